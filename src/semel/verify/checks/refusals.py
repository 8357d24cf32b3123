"""What the body of a refusal must look like: a problem of RFC 9457, or Stripe's error. One pure function; it sends
nothing.
"""

from __future__ import annotations

from semel.verify.message import Answer
from semel.verify.model import Profile

PROBLEM = "application/problem+json"
#: Members of a JSON object that name an error, whatever its shape.
TELLING = ("type", "code", "error", "error_code", "errors")


def fault_of(profile: Profile, answer: Answer, *, is_strict: bool) -> str | None:
    """Say what is wrong with the body of a refusal; None if it says what it is: strictly, to a program."""
    content = answer.json()
    if profile.has_problems:
        return _fault_of_problem(answer, content, is_strict=is_strict)
    error = content.get("error") if isinstance(content, dict) else None
    if not isinstance(error, dict):
        return f'The {answer.status} has no body such as {{"error": {{"type": …}}}}.'
    kind = error.get("type")
    return None if isinstance(kind, str) and kind else f"The error of the {answer.status} has no type."


def _fault_of_problem(answer: Answer, content: object, *, is_strict: bool) -> str | None:
    if answer.media_type != PROBLEM:
        linked = any("describedby" in each or "help" in each for each in answer.all("link"))
        # The draft recommends problems. An error of another shape will do if it tells what it is.
        is_told = isinstance(content, dict) and any(content.get(each) for each in TELLING)
        if linked or is_told or (answer.body.strip() and not is_strict):
            return None
        return f"The {answer.status} is {answer.media_type or 'without a type'}, not {PROBLEM}, and names no error."
    if not isinstance(content, dict):
        return f"The {answer.status} says that it is a problem, and its body is no JSON object."
    status, kind = content.get("status"), content.get("type", "about:blank")
    if status is not None and status != answer.status:
        return f"The problem says status {status}, and the answer is {answer.status}."
    if not isinstance(kind, str) or kind in {"", "about:blank"}:
        return f"The problem of the {answer.status} has no type of its own, so it can't be told from others."
    return None
