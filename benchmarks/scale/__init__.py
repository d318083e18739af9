"""How every part of Shardwise behaves as the work grows, measured."""
