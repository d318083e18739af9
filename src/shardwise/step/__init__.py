"""Records of one optimizer step: profile, timeline, comparison."""
