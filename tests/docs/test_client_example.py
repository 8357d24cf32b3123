"""The client that pays invoices: started again after a crash, it pays each once."""

from pathlib import Path

import pytest

from tests.client.served import served
from tests.docs.served import load


def test_payments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each invoice is paid once, whatever is lost on the way and however often the program is started."""
    monkeypatch.chdir(tmp_path)
    with served(tmp_path) as server:
        monkeypatch.setenv("PAYMENTS_API", server.url)
        server.faults.extend(["lose after", "lose before"])
        for _ in range(2):
            load("client_payments").main([17, 18])
        assert capsys.readouterr().out == "invoice 17: 201\ninvoice 18: 201\n" * 2
        assert (len(server.effects), set(server.effects.values())) == (2, {1})
        assert len(server.seen) == 4
