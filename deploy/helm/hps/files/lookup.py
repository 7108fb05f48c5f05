"""Asks a service for readiness, and for a vector of each model. Run by the pod of `helm test`, with Python alone.

The environment has the URL, perhaps a TOKEN, and the directory TLS with the service's certificate and authority.
"""

import json
import os
import ssl
import sys
import urllib.error
import urllib.request

TLS = os.environ.get("TLS")
HEADERS = {"Content-Type": "application/json"}
if token := os.environ.get("TOKEN"):
    HEADERS["Authorization"] = f"Bearer {token.strip()}"
CONTEXT = None
if TLS:
    ca = f"{TLS}/ca.crt"  # a Secret of another issuer than cert-manager may lack it
    CONTEXT = ssl.create_default_context(cafile=ca if os.path.exists(ca) else None)
    CONTEXT.load_cert_chain(f"{TLS}/tls.crt", f"{TLS}/tls.key")


def ask(path, body=None):
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(os.environ["URL"] + path, content, HEADERS)
    try:
        with urllib.request.urlopen(request, timeout=20, context=CONTEXT) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code == 421:  # the key is of another share: it was answered
            return None
        raise SystemExit(f"{path}: {error.code} {error.read().decode(errors='replace')}") from error


ask("/v2/health/ready?strict=false")
models = ask("/v2")["models"]
for model in models:
    for table in ask(f"/v2/models/{model}")["tables"][:1]:
        found = ask(f"/v1/models/{model}/lookup", {"tables": {table["name"]: [0]}})
        if found is not None and len(found["tables"][table["name"]][0]) != table["dim"]:
            raise SystemExit(f"{model}.{table['name']}: got {found}, expected {table['dim']} numbers")
        sys.stdout.write(f"{model}.{table['name']}: a vector of {table['dim']} numbers\n")
if not models:
    raise SystemExit("ready, and there is no model")
