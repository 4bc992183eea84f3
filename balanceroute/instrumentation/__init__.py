"""Optional engine-side step log for closed-loop validation."""
