import { expect, it } from "vitest";

import { errors, type Execution, InputClosed, OutputEnded, type Result } from "../src/index.ts";
import { all, eventually, failure, onEachRuntime } from "./gateway.ts";

const text = (bytes: Uint8Array): string => Buffer.from(bytes).toString();

onEachRuntime("programs that go on", (shared) => {
  it("a run is started, polled, read, waited for and found again", async () => {
    const { client, sessionId } = shared;
    await client.exec(sessionId, ["mkfifo", "run-gate"]);
    const run = await client.start(sessionId, "echo one; read go < run-gate; echo two; exit 4");
    await eventually(async () => (await run.poll()).stdout.includes("one"));
    expect(await run.poll()).toMatchObject({ status: "running", exitCode: undefined, stdout: "one\n" });
    const now = await all(client.getRun(run.runId).output({ follow: false }));
    expect(now.map((event) => event.type)).toEqual(["stdout"]);
    await client.exec(sessionId, "echo go > run-gate");
    expect(await run.wait()).toMatchObject({ exitCode: 4, stdout: "one\ntwo\n", status: "completed" });
    const late = await all(run.output({ start: 4 }));
    expect(late[0]).toMatchObject({ type: "stdout", seq: 4 });
    expect(late.at(-1)).toMatchObject({ type: "exit", exitCode: 4 });
  });

  it("source code is started too, and a signal reaches it", async () => {
    const { client, sessionId } = shared;
    const code = "import signal, sys\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))\nprint('ready', flush=True)\nsignal.pause()";
    const run = await client.start(sessionId, code, { language: "python" });
    await eventually(async () => (await run.poll()).stdout === "ready\n");
    await run.signal(10);
    expect((await run.wait()).exitCode).toBe(7);
  });

  it("a run that is waited for too long is an error of its own, and goes on", async () => {
    const { client, sessionId } = shared;
    const run = await client.start(sessionId, ["sleep", "60"]);
    expect(await failure(run.wait({ requestTimeout: 0.2 }))).toBeInstanceOf(errors.TimedOut);
    expect((await run.poll()).status).toBe("running");
    await run.kill();
    expect((await run.wait()).status).toBe("killed");
  });

  it("a transcript has what all programs printed", async () => {
    const { client, sessionId } = shared;
    await client.exec(sessionId, "echo in-the-transcript");
    const events = await all(client.transcript(sessionId));
    const printed = events.map((event) => (event.type === "exit" ? "" : text(event.data))).join("");
    expect(printed).toContain("in-the-transcript\n");
  });
});

onEachRuntime("programs that are talked to", (shared) => {
  it("a program is written to and read from in turns", async () => {
    await using program = await shared.client.open(shared.sessionId, ["cat"]);
    await program.write("one\ntwo\n");
    expect(text(await program.readUntil("\n"))).toBe("one\n");
    expect(text(await program.read(2))).toBe("tw");
    // What is waited for in vain is given up in time, and nothing is lost.
    expect(await failure(program.readUntil("never", { requestTimeout: 0.1 }))).toBeInstanceOf(errors.TimedOut);
    expect(await failure(program.read(-1, { signal: AbortSignal.timeout(100) }))).toBeInstanceOf(errors.TimedOut);
    expect(await failure(program.wait({ signal: AbortSignal.abort() }))).toBeInstanceOf(errors.Aborted);
    await program.closeStdin();
    expect(text(await program.read())).toBe("o\n");
    expect(await program.wait()).toMatchObject({ exitCode: 0 });
    expect(await failure(program.write("x"))).toBeInstanceOf(InputClosed);
  });

  it("much input and output at once block nobody", async () => {
    await using program = await shared.client.open(shared.sessionId, ["cat"]);
    const data = Buffer.alloc(5 << 20, "y");
    await program.write(data);
    await program.closeStdin();
    expect((await program.wait()).stdoutBytes.length).toBe(data.length);
  });

  it("a program that ends before it prints what is waited for says so", async () => {
    await using program = await shared.client.open(shared.sessionId, "echo other");
    expect(await failure(program.readUntil("never"))).toBeInstanceOf(OutputEnded);
    expect(text(await program.read())).toBe("other\n");
  });

  it("a terminal is a shell with a size", async () => {
    await using terminal = await shared.client.terminal(shared.sessionId, undefined, { rows: 30, columns: 100 });
    await terminal.write("stty size; exit 3\n");
    expect(text(await terminal.readUntil("30 100"))).toContain("30 100");
    expect((await terminal.wait()).exitCode).toBe(3);
  });

  it("events of a program come in order, its exit last", async () => {
    await using program = await shared.client.open(shared.sessionId, "echo a; echo b >&2; exit 2", { stdin: false });
    const events = await all(program);
    expect(events.at(-1)).toMatchObject({ type: "exit", exitCode: 2 });
    expect(events.length).toBe(3);
  });

  it("closing kills", async () => {
    const { client, sessionId } = shared;
    const program = await client.open(sessionId, ["sleep", "60"], { execId: "closed-program" });
    await program.close();
    expect((await program.wait()).status).toBe("killed");
  });

  it("a program that is not there is an error", async () => {
    expect(await failure(shared.client.open(shared.sessionId, ["no-such-program"]))).toMatchObject({ code: "ENOENT" });
  });
});

onEachRuntime("contexts", (shared) => {
  it("variables stay, results are shown, errors are told", async () => {
    const { client, sessionId } = shared;
    await using context = await client.createContext(sessionId, "python");
    expect((await context.run("x = 41")).results).toEqual([]);
    const seen: string[] = [];
    const done = await context.run("import sys; print('out'); print('err', file=sys.stderr); x + 1", {
      onStdout: (data) => seen.push(text(data)),
      onResult: (result) => seen.push(result.text ?? ""),
    });
    expect(done).toMatchObject({ text: "42", stdout: "out\n", stderr: "err\n", exitCode: 0, contextState: "ready" });
    expect(seen.join("")).toContain("42");
    const failed = await context.run("1 / 0");
    expect(failed.error).toMatchObject({ name: "ZeroDivisionError" });
    expect(failed.error?.traceback).toContain("1 / 0");
    expect((await client.listContexts(sessionId)).map((item) => item.contextId)).toContain(context.contextId);
  });

  it("rich results have all their media types", async () => {
    await using context = await shared.client.createContext(shared.sessionId);
    const code = [
      "class Shown:",
      "    def _repr_html_(self): return '<b>hi</b>'",
      "    def _repr_png_(self): return bytes([137, 80, 78, 71])",
      "    def _repr_json_(self): return {'a': [1]}",
      "Shown()",
    ].join("\n");
    const [shown] = (await context.run(code)).results;
    expect(shown).toMatchObject({ html: "<b>hi</b>", json: { a: [1] }, isMainResult: true });
    expect(shown?.png).toEqual(Buffer.of(137, 80, 78, 71));
    expect(shown?.formats()).toContain("text/plain");
  });

  it("a stream tells everything as it comes, and last the execution", async () => {
    await using context = await shared.client.createContext(shared.sessionId);
    const events = await all(context.stream("print('a')\n'shown'"));
    expect(events.map((event) => event.type)).toEqual(["stdout", "result", "execution"]);
    expect((events[1] as Result).text).toBe("'shown'");
    expect((events[2] as Execution).executionCount).toBe(1);
  });

  it("an interrupt stops what runs, and an aborted signal does too", async () => {
    const { client, sessionId } = shared;
    await using context = await client.createContext(sessionId);
    let begun = (): void => undefined;
    const hasBegun = new Promise<void>((resolve) => (begun = resolve));
    const running = context.run("import time; print('go', flush=True); time.sleep(60)", { onStdout: begun });
    await hasBegun;
    expect((await client.listContexts(sessionId)).map((item) => item.state)).toContain("busy");
    expect(await context.interrupt()).toBe(true);
    expect((await running).error?.name).toBe("KeyboardInterrupt");
    const controller = new AbortController();
    const aborted = failure(
      context.run("kept = 1\nprint('go', flush=True)\ntime.sleep(60)", {
        signal: controller.signal,
        onStdout: () => {
          controller.abort();
        },
      }),
    );
    expect(await aborted).toBeInstanceOf(errors.Aborted);
    expect((await context.run("kept")).text).toBe("1");
    await context.restart();
    expect((await context.run("kept")).error?.name).toBe("NameError");
  });

  it("bash and node have contexts too", async () => {
    const { client, sessionId } = shared;
    await using bash = await client.createContext(sessionId, "bash", { contextId: "shell" });
    await bash.run("V=kept");
    expect((await client.getContext(sessionId, "shell").run("echo $V")).stdout).toBe("kept\n");
    await using node = await client.createContext(sessionId, "node");
    await node.run("const v = 20");
    expect((await node.run("v + 1")).text).toBe("21");
  });

  it("a context that is gone is an error of its own", async () => {
    const { client, sessionId } = shared;
    expect(await failure(client.getContext(sessionId, "none").run("1"))).toBeInstanceOf(errors.ContextNotFound);
  });
});
