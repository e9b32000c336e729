"""Which requests run in the next step: batching, admission, owners, preemption, cached prefixes. No torch here."""
