"""The program on the page about natural keys does what the page says."""

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.docs.served import BASE_URL, load

ORDER = "/merchants/7/orders/A-17"


def test_natural_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second click gets the stored order, even when it is paid; another total is refused; ten at once make one."""
    monkeypatch.chdir(tmp_path)
    app = load("natural_keys").app
    with httpx.Client(transport=httpx.WSGITransport(app), base_url=BASE_URL) as client:
        first = client.put(ORDER, json={"total": 500})
        again = client.put(ORDER, json={"total": 500})
        client.post(f"{ORDER}/pay")
        later = client.put(ORDER, json={"total": 500})
        other = client.put(ORDER, json={"total": 600})
        with ThreadPoolExecutor(10) as pool:
            clicks = list(pool.map(lambda _: client.put("/merchants/7/orders/B", json={"total": 1}), range(10)))
    assert (first.status_code, again.status_code, first.json()) == (201, 200, again.json())
    assert (later.status_code, later.json()) == (200, first.json() | {"status": "paid"})
    assert (other.status_code, other.json()["code"]) == (422, "natural-key-reused")
    assert sorted(each.status_code for each in clicks) == [200] * 9 + [201]
    with closing(sqlite3.connect("shop.db")) as connection:
        assert connection.execute("SELECT number, total FROM orders").fetchall() == [("A-17", 500), ("B", 1)]
