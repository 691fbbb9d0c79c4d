"""The audit trail: an append-only chain of rows, who did what to which session, allowed or not."""
