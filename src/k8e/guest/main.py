"""What the guest does when it starts, and the operations that it offers."""

from __future__ import annotations

import os
import resource
import signal
from typing import Any, Callable

from k8e.guest.contexts import Contexts
from k8e.guest.execs import Execs
from k8e.guest.files import (
    Download,
    Upload,
    get_stat,
    make_directory,
    make_link,
    rename_path,
    set_mode,
)
from k8e.guest.limits import COUNTED, SESSION_LIMITS
from k8e.guest.link import GuestLink
from k8e.guest.loop import READ, Loop
from k8e.guest.paths import make_folders
from k8e.guest.ports import Ports
from k8e.guest.setup import (
    TOKEN_VARIABLE,
    SessionPlace,
    leave_log,
    own_home,
    put_token,
    rehearse,
    rehearse_binding,
)
from k8e.guest.spawn import STOCK, WORKSPACE, as_user, kill_others, list_processes
from k8e.guest.terminals import Terminals, signal_foreground
from k8e.guest.trees import Listing, remove_path
from k8e.guest.warm import WarmWait
from k8e.guest.wire import RESULT, pack


class Guest:
    """PID 1: reaps, answers calls, never exits."""

    link_class = GuestLink

    def __init__(self) -> None:
        self.loop = Loop()
        self.execs = Execs(self.loop)
        self.place = SessionPlace()
        self._ahead = False  # it was prepared before there was a session
        self._hidden: list[str] = []  # what the transcript does not show, but for tokens
        self._warm: dict[str, list[str]] = {}
        self.execs.contexts = Contexts(self.loop, self.execs)

    def operations(self) -> dict[str, Any]:
        return {
            "exec": self.execs.start,
            "attach": self.execs.attach,
            "transcript": self.execs.transcript.attach,
            "signal": self._signal,
            "resize": self._resize,
            "execs": _answered(self._list_execs),
            "read": Download,
            "write": Upload,
            "list": self._list,
            "stat": _answered(get_stat),
            "remove": self._remove,
            "rename": _answered(rename_path),
            "mkdir": _answered(make_directory),
            "symlink": _answered(make_link),
            "chmod": _answered(set_mode),
            "processes": _answered(list_processes),
            "connect": Ports(self.loop).connect,
            "ping": _answered(lambda _: {}),
            "settle": self._settle,
            "bind": self._bind,
            "token": _answered(self._renew_token),
            "hold": _answered(lambda _: self.execs.hold(True)),
            "release": _answered(lambda _: self.execs.hold(False)),
            **Terminals(self.loop, self.execs).operations(),
            **self.execs.contexts.operations(),
        }

    def run(self) -> None:
        limit_files()
        own_home()
        self._catch_children()
        self.execs.link = self.link_class(self.loop, self.operations())
        self.execs.link.dial()
        self.loop.run()

    def _catch_children(self) -> None:
        waking, woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGTSTP):
            # The parent of the gateway may have ignored some, and programs would inherit that.
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, _ignore)
        # Python would turn this one into an exception. A handler, unlike SIG_IGN, is not inherited.
        signal.signal(signal.SIGINT, _ignore)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)

        def on_wake(_: int) -> None:
            try:
                os.read(waking, 4096)
            except BlockingIOError:
                pass
            self.execs.reap()
            STOCK.refill()

        self.loop.watch(waking, READ, on_wake)

    def _list_execs(self, _: dict[str, Any]) -> dict[str, Any]:
        waiting = self.execs.warmth.ready
        listed = self.execs.listing()
        return {"execs": listed, "warm": sum(waiting.values()), "waiting": waiting}

    def _list(self, channel: Any, spec: dict[str, Any]) -> None:
        Listing(self.loop, channel, spec)

    def _remove(self, channel: Any, spec: dict[str, Any]) -> None:
        remove_path(self.loop, channel, spec)

    def _signal(self, channel: Any, spec: dict[str, Any]) -> None:
        target = self.execs.get(spec)
        answer: dict[str, Any] = {}
        if spec.get("terminate"):
            target.terminate("killed")
        elif spec.get("foreground"):
            answer["process_group_id"] = signal_foreground(target, int(spec["signal"]))
        else:
            target.send_signal(int(spec["signal"]))
        channel.send(RESULT, pack(dict(target.describe(), **answer)))

    def _resize(self, channel: Any, spec: dict[str, Any]) -> None:
        self.execs.get(spec).resize(int(spec["rows"]), int(spec["cols"]))
        channel.send(RESULT, pack({}))

    def _settle(self, channel: Any, spec: dict[str, Any]) -> None:
        """Prepare a sandbox without a session; answered when the requested interpreters wait."""
        self._settle_once(spec)
        self.place.renew_folders(spec.get("folders") or [])
        self._ahead = True
        rehearse(self.execs)
        rehearse_binding()
        wanted, env = dict(spec.get("warm") or {}), dict(spec.get("env") or {})
        WarmWait(channel, self.execs.warmth, wanted, env)

    def _settle_once(self, spec: dict[str, Any]) -> None:
        self.execs.oom_score_adj = int(spec.get("oom_score_adj") or 0)
        self.place.settle()

    def _bind(self, channel: Any, spec: dict[str, Any]) -> None:
        """Become the sandbox of one session: its environment, limits and workspace."""
        self._settle_once(spec)
        self._keep_limits(spec)
        if self._ahead:  # the interpreters that an image starts with are not programs of a session
            kill_others(self.execs.warmth.keeps)
            self._ahead = False
        if spec.get("other_workspace"):
            self.place.renew_workspace()
        self.place.renew_folders(spec.get("folders") or [])
        self.place.give_up_mounting()
        leave_log()
        self.execs.env = dict(spec.get("env") or {})
        self._hidden = list(spec.get("hidden") or [])
        self._take_token(str(spec.get("token") or ""))
        self._settle_at(spec.get("cwd") or WORKSPACE)
        warm = self._warm = dict(spec.get("warm") or {})
        if spec.get("other_limits"):  # there may be no room for interpreters, and the host waits
            self.execs.warmth.bind(self.execs.env, warm)
            channel.send(RESULT, pack({}))
        else:  # no caller waits for this, and nothing is started before it is done
            channel.send(RESULT, pack({}))
            self.execs.warmth.bind(self.execs.env, warm)

    def _take_token(self, token: str) -> None:
        """Give it to all programs from now on; the transcript shows neither it nor the last one."""
        before = self.execs.env.get(TOKEN_VARIABLE, "")
        self.execs.transcript.hide([*self._hidden, *filter(None, (before, token))])
        if token:
            put_token(token)
            self.execs.env = dict(self.execs.env, **{TOKEN_VARIABLE: token})

    def _renew_token(self, spec: dict[str, Any]) -> dict[str, Any]:
        """The host has made a new token, before the last one expires."""
        self._take_token(str(spec["token"]))
        self.execs.warmth.bind(self.execs.env, self._warm)
        return {}

    def _keep_limits(self, spec: dict[str, Any]) -> None:
        """Set limits for all programs from now on, and for the interpreters that wait."""
        SESSION_LIMITS.update(spec.get("limits") or {})
        wanted = [(resource.RLIMIT_NOFILE, int(SESSION_LIMITS.get("open_files") or 0))]
        if spec.get("nproc"):
            COUNTED["pids"] = int(spec["nproc"])
            wanted.append((resource.RLIMIT_NPROC, COUNTED["pids"]))
        if spec.get("data"):  # of each program, where nothing limits all of them together
            wanted.append((resource.RLIMIT_DATA, int(spec["data"])))
        for kind, most in wanted:
            hard = resource.getrlimit(kind)[1]
            if most and (hard == resource.RLIM_INFINITY or most < hard):
                resource.setrlimit(kind, (most, most))
                self.execs.warmth.limit(kind, most)

    def _settle_at(self, cwd: str) -> None:
        """Start commands in ``cwd`` from now on; it is made with the rights of the user."""
        if cwd != WORKSPACE:
            with as_user():
                make_folders(cwd)
        self.execs.cwd = cwd


def limit_files() -> None:
    """Set limits that no runtime may set in a foreign user namespace; nothing elsewhere."""
    most = int(os.environ.get("K8E_OPEN_FILES", "0"))
    if most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _answered(function: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[..., None]:
    """An operation that is answered at once by what ``function`` returns."""

    def operation(channel: Any, spec: dict[str, Any]) -> None:
        channel.send(RESULT, pack(function(spec)))

    return operation


def _ignore(*_: object) -> None:
    """Ignore a signal: it only has to wake the loop."""


if __name__ == "__main__":
    Guest().run()
