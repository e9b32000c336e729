"""Workloads: which requests arrive when, how long they are, and what they share.

    requests = load("agentic", ["workload.num_sessions=100"]).requests()
    print(summarise(requests).table())
    requests.tokens(0, vocab_size=32000)

A description is frozen and says everything: the same one gives the same requests, to the last token.
"""

from splash.workload.feed import Feed
from splash.workload.kinds import Workload
from splash.workload.load import from_mapping, load
from splash.workload.requests import Arrival, Phase, Prompt, Requests
from splash.workload.summary import Summary, summarise
from splash.workload.trace import Trace, write_trace

__all__ = [
    "Workload",
    "load",
    "from_mapping",
    "Requests",
    "Arrival",
    "Prompt",
    "Phase",
    "Feed",
    "Summary",
    "summarise",
    "Trace",
    "write_trace",
]
