"""Parsers that others wrote, driven by lines of JSON: rfc8785 and http-sf.

{"json": TEXT} is answered by {"canonical": TEXT or null}, {"header": TEXT} by {"key": TEXT or null}.
"""

import json
import sys

import http_sf
import rfc8785


def canonical(text):
    try:
        return rfc8785.dumps(json.loads(text)).decode()
    except (ValueError, rfc8785.CanonicalizationError):
        return None


def key(text):
    try:
        value, _ = http_sf.parse(text.encode(), tltype="item")
    except (ValueError, UnicodeError):
        return None
    return value if type(value) is str else None


for line in sys.stdin:
    asked = json.loads(line)
    if "json" in asked:
        answer = {"canonical": canonical(asked["json"])}
    else:
        answer = {"key": key(asked["header"])}
    print(json.dumps(answer))
