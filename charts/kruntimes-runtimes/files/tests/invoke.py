"""Calls a function as its callers do: address and CA from the Run, the own ServiceAccount's token, TLS verified.

Succeeds when the function answers what it was sent; otherwise says why it did not, after some patience with
things that are just being made."""

import base64
import http.client
import json
import os
import socket
import ssl
import sys
import time
import urllib.parse
import uuid

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount/"
NAMESPACE, RUN = os.environ["NAMESPACE"], os.environ["RUN"]
GATEWAY_ADDRESS = os.environ.get("GATEWAY_ADDRESS", "")
DEADLINE = time.monotonic() + float(os.environ["TIMEOUT_SECONDS"])


class NotYet(Exception):
    """Why the call did not succeed, so far."""


class Never(Exception):
    """Why no call will succeed any more."""


class Connection(http.client.HTTPSConnection):
    """HTTPS that trusts one CA, and can connect to an address that no name server knows."""

    def __init__(self, host, port, ca, address=None):
        super().__init__(host, port, timeout=10, context=ssl.create_default_context(cadata=ca))
        self.address = address or (host, port)

    def connect(self):
        plain = socket.create_connection(self.address, self.timeout)
        self.sock = self._context.wrap_socket(plain, server_hostname=self.host)

    def ask(self, method, path, body=None):
        with open(ACCOUNT + "token") as file:
            token = file.read().strip()
        headers = {"Authorization": "Bearer " + token, "Content-Type": "application/json"}
        try:
            self.request(method, path, body, headers)
            answer = self.getresponse()
            return answer.status, answer.read()
        except socket.gaierror as error:
            remedy = "where Pods cannot look names up, set test.gatewayAddress=IP:443 to the Service's address"
            raise NotYet(f"{method} https://{self.host}{path}: the name is not found ({error}); {remedy}") from error
        except (OSError, http.client.HTTPException) as error:
            raise NotYet(f"{method} https://{self.host}{path}: {error!r}") from error
        finally:
            self.close()


def endpoint():
    """URL and CA of the Run, once it is Ready."""
    with open(ACCOUNT + "ca.crt") as file:
        api = Connection(os.environ["KUBERNETES_SERVICE_HOST"], int(os.environ["KUBERNETES_SERVICE_PORT"]), file.read())
    path = f"/apis/kruntimes.io/v1alpha1/namespaces/{NAMESPACE}/runs/{RUN}"
    status, body = api.ask("GET", path)
    if status != 200:
        raise NotYet(f"Run {RUN} cannot be read: {status} {body[:500]!r}")
    status = json.loads(body).get("status", {})
    conditions = {it["type"]: it for it in status.get("conditions", [])}
    said = "; ".join(f"{it['type']}={it['status']} {it['reason']}: {it['message']}" for it in conditions.values())
    if conditions.get("Completed", {}).get("status") == "True":
        raise Never(f"Run {RUN} has ended: {said}")
    if conditions.get("Ready", {}).get("status") != "True":
        raise NotYet(f"Run {RUN} is not Ready: {said or 'nobody has looked at it; does the scheduler run?'}")
    found = status.get("endpoint", {})
    if not found.get("url") or not found.get("caBundle"):
        raise NotYet(f"Run {RUN} has no status.endpoint with url and caBundle")
    return found["url"], base64.b64decode(found["caBundle"]).decode()


def call():
    """One call; returns the line that says how it went."""
    url, ca = endpoint()
    parts = urllib.parse.urlsplit(url)
    address = None
    if GATEWAY_ADDRESS:
        host, _, port = GATEWAY_ADDRESS.rpartition(":")
        address = (host.strip("[]"), int(port))
    gateway = Connection(parts.hostname, parts.port or 443, ca, address)
    sent = {"probe": str(uuid.uuid4())}
    started = time.monotonic()
    status, body = gateway.ask("POST", parts.path, json.dumps(sent))
    took = (time.monotonic() - started) * 1000
    if status != 200:
        raise NotYet(f"POST {url}: {status} {body[:1000].decode(errors='replace')}")
    if json.loads(body) != sent:
        raise NotYet(f"POST {url}: the function answered {body[:1000]!r} and not what it was sent")
    return f"POST {url}: 200 in {took:.0f} ms, certificate of {parts.hostname} verified, the answer is right"


last = None
while True:
    try:
        print(call())
        sys.exit(0)
    except (NotYet, Never) as problem:
        before, last = last, problem
    if isinstance(last, Never) or time.monotonic() >= DEADLINE:
        print(f"FAILED: {last}", file=sys.stderr)
        sys.exit(1)
    # Once for each new reason: a log of the same line says nothing more.
    if str(last) != str(before):
        print(f"waiting: {last}")
    time.sleep(2)
