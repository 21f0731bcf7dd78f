"""Stripe's official client for Python, unchanged, driven by lines of JSON.

    drive.py BASE_URL [TIMEOUT_SECONDS]

Each line of standard input is one call: {"id", "do", "params", "options"}; each line of standard
output is what became of one: {"id", "ok": {"object", "key", "replayed", "status"}} or
{"id", "error": {"class", "status", "code", "type", "message"}}. Calls run side by side.
"""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import stripe

base, timeout = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 20
http = stripe.RequestsClient(timeout=timeout)
client = stripe.StripeClient(
    "sk_test_python", base_addresses={"api": base}, http_client=http, max_network_retries=2
)
# The older style, with its state in the module.
stripe.api_key = "sk_test_python"
stripe.api_base = base
stripe.max_network_retries = 2
stripe.default_http_client = http

CALLS = {
    "intents.create": lambda p, o: client.v1.payment_intents.create(p, o),
    "intents.retrieve": lambda p, o: client.v1.payment_intents.retrieve(p["id"], {}, o),
    "charges.create": lambda p, o: client.v1.charges.create(p, o),
    "charges.retrieve": lambda p, o: client.v1.charges.retrieve(p["id"], {}, o),
    "refunds.create": lambda p, o: client.v1.refunds.create(p, o),
    "refunds.retrieve": lambda p, o: client.v1.refunds.retrieve(p["id"], {}, o),
    "module.create": lambda p, o: stripe.PaymentIntent.create(**p, **o),
}
written = threading.Lock()


def call(line):
    request = json.loads(line)
    answer = {"id": request["id"]}
    try:
        made = CALLS[request["do"]](request.get("params", {}), request.get("options", {}))
        last = made.last_response
        answer["ok"] = {
            "object": json.loads(str(made)),
            "key": last.idempotency_key,
            "replayed": last.headers.get("Idempotent-Replayed"),
            "status": last.code,
        }
    except stripe.StripeError as error:
        answer["error"] = {
            "class": type(error).__name__,
            "status": error.http_status,
            "code": error.error.code if error.error else error.code,
            "type": error.error.type if error.error else None,
            "message": str(error),
        }
    except Exception as error:  # not typed: the tests have to see it
        answer["untyped"] = repr(error)
    with written:
        print(json.dumps(answer), flush=True)


with ThreadPoolExecutor(max_workers=256) as pool:
    for one in sys.stdin:
        pool.submit(call, one)
