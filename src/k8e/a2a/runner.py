"""Tasks of one caller in sandboxes: how many run at once, who shares a sandbox, how they end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from typing import NamedTuple

from k8e import errors
from k8e.a2a import message, tasks
from k8e.a2a.message import Fault, Job, MessageRefusal, TaskMessage
from k8e.a2a.tasks import Task
from k8e.client.async_runs import AsyncRun
from k8e.client.asynchronous import AsyncSandboxClient
from k8e.client.results import Exit, Stdout

TENANT = "a2a"
"""Of the sessions, among those of the caller."""
KEPT = 50  # tasks of a caller that are over and can still be read
OUTPUT = 250 << 10  # bytes of each stream; both fit into what the guest keeps for a reader
KILL_SECONDS = 10.0
logger = logging.getLogger(__name__)


class TaskTerms(NamedTuple):
    """How long sandboxes are kept, and how much a caller may have at once."""

    idle_timeout: float = 600.0
    running: int = 4
    contexts: int = 8
    longest: float = 3600.0
    """The longest time-out that a task may ask for."""


class _Context:
    """Tasks that share a session: later ones find the files of earlier ones."""

    def __init__(self, template: str) -> None:
        self.session_id = ""
        self.template = template
        self.lock = asyncio.Lock()
        self.running = 0


class TaskRunner:
    """Runs the tasks of one caller."""

    def __init__(self, client: AsyncSandboxClient, terms: TaskTerms) -> None:
        self._client = client
        self._tasks: dict[str, Task] = {}
        self._contexts: dict[str, _Context] = {}  # the last one is the one used last
        self._ending: set[asyncio.Task[None]] = set()
        self.terms = terms

    def submit(self, ask: TaskMessage) -> Task:
        """Begin a task; the task itself reports the result."""
        if ask.task_id:
            self._refuse_more(self.get(ask.task_id))
        task = Task(ask.context_id or f"ctx-{secrets.token_hex(12)}")
        if isinstance(ask.wants, MessageRefusal):
            self._keep(task)
            task.change(tasks.REJECTED, ask.wants.text)
            return task
        running = sum(not item.over for item in self._tasks.values())
        if running >= self.terms.running:
            raise Fault(message.BUSY, f"{running} tasks run already; wait for one, or cancel one")
        context = self._context(task.context_id, ask.wants.template)
        context.running += 1
        self._keep(task)
        task.running = asyncio.create_task(self._run(task, context, ask.wants))

        def ended(_: asyncio.Task[None]) -> None:
            context.running -= 1
            task.change(tasks.CANCELED, "canceled before it began")  # if it is not over

        task.running.add_done_callback(ended)  # also runs if the task never began
        return task

    @staticmethod
    def _refuse_more(task: Task) -> None:
        how = "is over" if task.over else "takes no more messages"
        raise Fault(
            message.UNSUPPORTED,
            f"task {task.id} {how}; send a new message with its context, and without its id",
        )

    def get(self, task_id: str) -> Task:
        if task_id not in self._tasks:
            raise message.not_found(task_id)
        return self._tasks[task_id]

    async def cancel(self, task_id: str) -> Task:
        """End a task: its program is killed before this returns."""
        task = self.get(task_id)
        if task.over or task.running is None:
            raise Fault(message.NOT_CANCELABLE, f"task {task_id} is over: {task.status.state}")
        if not task.running.cancelling():  # a second one would interrupt the killing
            task.running.cancel()
        await asyncio.wait({task.running}, timeout=2 * KILL_SECONDS)
        return task

    async def close(self) -> None:
        """End everything: programs, streams, and every session that was made here."""
        running = [
            task.running
            for task in self._tasks.values()
            if task.running is not None and not task.over
        ]
        for item in running:
            item.cancel()
        try:
            if running:
                await asyncio.wait(running, timeout=KILL_SECONDS)
        finally:
            for context in self._contexts.values():
                self._end(context)
            if self._ending:
                await asyncio.wait(self._ending, timeout=KILL_SECONDS)

    # Tasks and contexts that are kept.

    def _keep(self, task: Task) -> None:
        self._tasks[task.id] = task
        over = [item for item in self._tasks.values() if item.over]
        for old in over[: max(0, len(over) - KEPT)]:
            del self._tasks[old.id]

    def _context(self, context_id: str, template: str) -> _Context:
        found = self._contexts.get(context_id)
        if found is not None and template and template != found.template:
            made = f"from the template {found.template!r}" if found.template else "without one"
            raise Fault(
                message.INVALID_PARAMS,
                f"the sandbox of context {context_id} was made {made}; begin another context",
            )
        if found is None:
            self._make_room()
            found = _Context(template)
        self._contexts.pop(context_id, None)
        self._contexts[context_id] = found
        return found

    def _make_room(self) -> None:
        """End the context that was not used for longest, if there are too many."""
        if len(self._contexts) < self.terms.contexts:
            return
        idle = [key for key, item in self._contexts.items() if not item.running]
        if not idle:
            raise Fault(
                message.BUSY, f"{len(self._contexts)} contexts have running tasks; use one of them"
            )
        self._end(self._contexts.pop(idle[0]))

    def _end(self, context: _Context) -> None:
        """Destroy the session of a context in the background."""
        if not context.session_id:
            return
        ending = asyncio.create_task(self._destroy(context.session_id))
        context.session_id = ""
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _destroy(self, session_id: str) -> None:
        with contextlib.suppress(errors.K8eError):
            await self._client.destroy_session(session_id)

    # Running.

    async def _run(self, task: Task, context: _Context, job: Job) -> None:
        try:
            await self._work(task, context, job)
        except asyncio.CancelledError:
            task.change(tasks.CANCELED, "canceled; its program was killed")
        except (errors.K8eError, OSError) as error:
            is_file = isinstance(error, OSError)
            hint = errors.file_hint(error, "check it") if is_file else error.hint
            task.change(tasks.FAILED, f"the sandbox failed: {error}. {hint}".strip())
        except Exception:
            logger.exception("an A2A task failed unexpectedly")
            task.change(tasks.FAILED, "k8e failed; its log says why")

    async def _work(self, task: Task, context: _Context, job: Job) -> None:
        session_id = await self._session(context)
        task.change(tasks.WORKING)
        try:
            await self._execute(task, session_id, job)
        except errors.SessionNotFound:
            if task.streams:
                raise  # it ran
            context.session_id = ""  # its idle time was over; a new one begins empty
            await self._execute(task, await self._session(context), job)

    async def _session(self, context: _Context) -> str:
        async with context.lock:
            if not context.session_id:
                # With an id of our own, so that it can be destroyed whenever we are interrupted.
                context.session_id = f"a2a-{secrets.token_hex(8)}"
                try:
                    await self._create(context)
                except BaseException:
                    self._end(context)
                    raise
            return context.session_id

    async def _create(self, context: _Context) -> None:
        await self._client.create_session(
            tenant_id=TENANT,
            session_id=context.session_id,
            template=context.template,
            idle_timeout=self.terms.idle_timeout,
        )

    async def _execute(self, task: Task, session_id: str, job: Job) -> None:
        for name, content in job.files:
            await self._client.write_file(session_id, f"/workspace/{name}", content)
        start = self._client.start(
            session_id, job.code, job.timeout, language=job.language, output_limit=OUTPUT
        )
        starting = asyncio.ensure_future(start)
        try:
            run = await asyncio.shield(starting)
            async for event in run.output():
                if isinstance(event, Exit):
                    _finish(task, event)
                else:
                    stream = "stdout" if isinstance(event, Stdout) else "stderr"
                    task.printed(stream, event.data)
        except asyncio.CancelledError:
            await _kill(starting)
            raise


async def _kill(starting: asyncio.Future[AsyncRun]) -> None:
    """Kill a program, even one that is being started, and wait until it is dead."""
    with contextlib.suppress(errors.K8eError, OSError, TimeoutError):
        async with asyncio.timeout(KILL_SECONDS):
            run = await starting
            await run.kill()
            async for _ in run.output():
                pass


def _finish(task: Task, end: Exit) -> None:
    task.printed_all()
    task.came_to(
        {
            "exit_code": end.exit_code,
            "status": end.status,
            "duration_ms": end.duration_ms,
            "truncated": end.truncated,
            "denials": [
                {"host": item.name or item.address, "port": item.port, "rule": item.rule}
                for item in end.denials
            ],
        }
    )
    if end.status == "timed_out":
        task.change(tasks.FAILED, "the code was killed: it timed out")
    elif end.exit_code:
        task.change(tasks.FAILED, f"the code ended with exit code {end.exit_code}")
    else:
        task.change(tasks.COMPLETED)
