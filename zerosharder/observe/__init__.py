"""What happened and what it cost: the event log, counters, traces, reports."""
