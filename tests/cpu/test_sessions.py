"""One session in place of another: the model is as before, whatever happens inside."""

import pytest

from blasst.integrations.sessions import in_place_of


class Session:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def activate(self):
        self.log.append(f"+{self.name}")

    def deactivate(self):
        self.log.append(f"-{self.name}")


def test_the_previous_session_comes_back():
    log = []
    with in_place_of(Session(log, "a"), lambda: Session(log, "b")) as session:
        assert session.name == "b"
    with in_place_of(None, lambda: session):
        pass
    assert log == ["-a", "+b", "-b", "+a", "+b", "-b"]


def test_the_previous_session_comes_back_when_the_other_cannot_be_made_or_fails():
    log = []

    def none_can_be_served():
        raise ValueError("no layer")

    with pytest.raises(ValueError, match="no layer"), in_place_of(Session(log, "a"), none_can_be_served):
        pass
    with pytest.raises(KeyError), in_place_of(Session(log, "a"), lambda: Session(log, "b")):
        raise KeyError
    assert log == ["-a", "+a", "-a", "+b", "-b", "+a"]
