"""The programs of the pages on Django run, each in a process of its own: Django can be set up once in each."""

import os
import subprocess
import sys
from pathlib import Path

from tests.docs.served import ROOT

DJANGO = """
from django.core.management import call_command
from django.db import connection
import httpx
from tests.docs.served import BASE_URL, load
example = load("django_app")
call_command("check", fail_level="WARNING")
call_command("migrate", verbosity=0)
with connection.schema_editor() as editor:
    editor.create_model(example.Payment)
with httpx.Client(transport=httpx.WSGITransport(app=example.application), base_url=BASE_URL) as client:
    headers = {"Idempotency-Key": "k", "X-Account": "a"}
    answers = [client.post("/payments", json={"amount": amount}, headers=headers) for amount in (5, 5, 6)]
    answers.append(client.post("/payments", json={"amount": 5}, headers={"X-Account": "a"}))
    answers.append(client.post("/payments", json={"amount": 5}, headers={"Idempotency-Key": "k"}))
print([answer.status_code for answer in answers], answers[1].headers["idempotent-replayed"])
print(answers[0].content == answers[1].content, list(example.Payment.objects.values_list("amount", "account")))
"""

DRF = """
from django.core.management import call_command
from django.db import connection
import httpx
from tests.docs.served import BASE_URL, load
example = load("drf_app")
from django.contrib.auth.models import User
call_command("check", fail_level="WARNING")
call_command("migrate", verbosity=0)
with connection.schema_editor() as editor:
    editor.create_model(example.Payment)
User.objects.create_user("jane", password="secret")
with httpx.Client(transport=httpx.WSGITransport(app=example.application), base_url=BASE_URL) as client:
    key = {"Idempotency-Key": "k"}
    jane = ("jane", "secret")
    answers = [client.post("/payments", json={"amount": amount}, headers=key, auth=jane) for amount in (5, 5, 6)]
    answers.append(client.post("/payments", json={"amount": 5}, auth=jane))
    answers.append(client.post("/payments", json={"amount": 5}, headers=key))
    answers.append(client.patch("/payments/1", json={"amount": 7}, auth=jane))
    transfer = {"json": {"amount": 9}, "headers": {"Idempotency-Key": "t"}, "auth": jane}
    answers += [client.post("/transfers", **transfer) for _ in range(2)]
replayed = [each.headers["idempotent-replayed"] for each in (answers[1], answers[-1])]
print([answer.status_code for answer in answers], *replayed)
print(answers[0].content == answers[1].content, list(example.Payment.objects.values_list("amount", flat=True)))
"""


def said_by(program: str, folder: Path) -> list[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    command = [sys.executable, "-W", "error", "-c", program]
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()[-2:]


def test_django(tmp_path: Path) -> None:
    """A guarded view pays once; another body, a missing key and nobody's request are refused."""
    assert said_by(DJANGO, tmp_path) == ["[201, 201, 422, 400, 400] true", "True [(5, 'a')]"]


def test_rest_framework(tmp_path: Path) -> None:
    """A viewset's create pays once, after REST framework's login; its other actions need no key."""
    assert said_by(DRF, tmp_path) == ["[201, 201, 422, 400, 403, 200, 201, 201] true true", "True [7]"]
