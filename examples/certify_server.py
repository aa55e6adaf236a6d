"""Certify a changed server against the one that it replaces.

    python examples/certify_server.py http://127.0.0.1:8000/v1 http://127.0.0.1:8001/v1 rows.jsonl

The rows have the fields prompt and reference; answers are the last number of a response.
"""

import sys
from pathlib import Path

from lenience.certification.certify import certify
from lenience.certification.question import CertifyConfig
from lenience.integrations.endpoints import Endpoint, ServedOptions, ServedPair
from lenience.tasks import load_task

reference, candidate, rows = sys.argv[1:4]
run = Path("run")
pair = ServedPair(
    Endpoint.parse(reference, "reference", "reference"),
    [Endpoint.parse(candidate, "candidate", "candidate")],
    ServedOptions(in_flight=16, store=run / "requests.jsonl"),
)
task = load_task(spec=rows, answer="last-number")
# at most 5 % of the prompts may be answered worse, with 95 % confidence
question = CertifyConfig(settings=(("served:candidate; window=0",),), max_drop=0.05)
certificate = certify(pair, task, run, question)
if certificate.certified:
    print(f"at most {certificate.max_drop:.0%} of the answers get worse")
else:
    print(f"not certified: {certificate.reason}")
print(
    f"{certificate.n} prompts, {certificate.losses:g} lost; see {run / 'certificate.html'}"
)
