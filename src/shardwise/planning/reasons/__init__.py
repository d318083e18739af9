"""Why a plan says what it says: each reason is one class, with its data, its words and its JSON."""
