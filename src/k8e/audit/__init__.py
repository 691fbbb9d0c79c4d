"""Who did what to which session, allowed or not: a chain of rows that is only ever added to."""
