"""Which requests run in the next step: batching, admission, owners and preemption. Torch is never imported here."""
