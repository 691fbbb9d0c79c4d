import { inspect } from "node:util";

import { expect, it } from "vitest";

import { errors, ExecResult, type Exit, SandboxClient } from "../src/index.ts";
import { all, endpoint, eventually, failure, onEachRuntime } from "./gateway.ts";

onEachRuntime("commands", (shared) => {
  it("a command gives output, exit code and facts", async () => {
    const { client, sessionId } = shared;
    const result = await client.exec(sessionId, "echo out; echo err >&2; exit 3");
    expect(result).toBeInstanceOf(ExecResult);
    expect(result).toMatchObject({ stdout: "out\n", stderr: "err\n", exitCode: 3, status: "completed", sessionId });
    expect(result.truncated).toBe(false);
    expect(JSON.parse(JSON.stringify(result))).toMatchObject({ stdout: "out\n", exitCode: 3 });
    expect(inspect(result)).toContain("stdout: 'out\\n'"); // what console.log shows
  });

  it("a list is started without a shell", async () => {
    expect((await shared.client.exec(shared.sessionId, ["echo", "$HOME", "a b"])).stdout).toBe("$HOME a b\n");
  });

  it("source code runs in each language", async () => {
    const { client, sessionId } = shared;
    const ran = async (code: string, language: "python" | "node" | "bash" | "ts"): Promise<string> =>
      (await client.run(code, language, { sessionId })).stdout;
    expect(await ran("print(40 + 2)", "python")).toBe("42\n");
    expect(await ran("console.log(6 * 7)", "node")).toBe("42\n");
    expect(await ran("echo $((6 * 7))", "bash")).toBe("42\n");
    expect(await ran("const answer: number = 42; console.log(answer)", "ts")).toBe("42\n");
  });

  it("a command gets environment, folder and input", async () => {
    const { client, sessionId } = shared;
    await client.mkdir(sessionId, "deep");
    const result = await client.exec(sessionId, 'echo "$WORD"; pwd; cat', {
      env: { WORD: "hi" },
      cwd: "deep",
      stdin: "from stdin",
    });
    expect(result.stdout).toBe("hi\n/workspace/deep\nfrom stdin");
  });

  const large = Buffer.alloc(3 << 20, "x");
  it.each([
    ["bytes", () => large],
    ["a blob", () => new Blob([large])],
    ["a web stream", () => new Blob([large]).stream()],
    ["an iterable", () => [large.subarray(0, 5), large.subarray(5)]],
  ])("input of any kind and size arrives while output flows: %s", async (_, content) => {
    const result = await shared.client.exec(shared.sessionId, ["cat"], { stdin: content(), outputLimit: 0 });
    expect(Buffer.compare(result.stdoutBytes, large)).toBe(0);
  });

  it("input that cannot be read is an error, and the command is killed", async () => {
    const { client, sessionId } = shared;
    const broken = async function* (): AsyncGenerator<string> {
      yield "a";
      await Promise.resolve();
      throw new RangeError("the source broke");
    };
    const execId = "broken-input";
    const error = await failure(client.exec(sessionId, ["cat"], { stdin: broken(), execId }));
    expect(error).toBeInstanceOf(RangeError);
    await eventually(async () => (await client.execs(sessionId)).find((item) => item.execId === execId)?.status === "killed");
  });

  it("a command that does not read its input ends all the same", async () => {
    const result = await shared.client.exec(shared.sessionId, ["true"], { stdin: Buffer.alloc(4 << 20) });
    expect(result.exitCode).toBe(0);
  });

  it("a command above its time is killed", async () => {
    const result = await shared.client.exec(shared.sessionId, "echo begun; sleep 60", 0.5);
    expect(result).toMatchObject({ status: "timed_out", stdout: "begun\n" });
    expect(result.limits.map((item) => item.limit)).toContain("timeout");
  });

  it("events come as they happen", async () => {
    const { client, sessionId } = shared;
    const events = client.execEvents(sessionId, "echo one; read go < gate; echo two >&2; exit 5");
    await client.exec(sessionId, ["mkfifo", "gate"]);
    const first = (await events.next()).value;
    expect(first).toMatchObject({ type: "stdout", seq: 0 });
    await client.exec(sessionId, "echo go > gate");
    const rest = await all(events);
    expect(rest.at(-1)).toMatchObject({ type: "exit", exitCode: 5 });
    expect(rest.some((event) => event.type === "stderr" && event.seq === 4)).toBe(true);
  });

  it("a stream is text whose characters are never torn", async () => {
    const code = String.raw`printf '\342\202'; sleep 0.2; printf '\254'; printf '\377'`;
    const chunks = await all(shared.client.execStream(shared.sessionId, code));
    expect(chunks.join("")).toBe("€\ufffd");
    expect(chunks[0]).not.toContain("\ufffd\ufffd");
  });

  it("leaving a stream kills the command", async () => {
    const { client, sessionId } = shared;
    const execId = "left-alone";
    for await (const event of client.execEvents(sessionId, "echo begun; sleep 60", { execId })) {
      expect(event.type).toBe("stdout");
      break;
    }
    expect((await client.execs(sessionId)).find((item) => item.execId === execId)?.status).not.toBe("running");
  });

  it("reading slowly slows the command down and loses nothing", async () => {
    const { client, sessionId } = shared;
    let length = 0;
    for await (const event of client.execEvents(sessionId, "head -c 6000000 /dev/zero; echo done > finished")) {
      if (event.type === "exit") break;
      if (length === 0) {
        await new Promise((resolve) => setTimeout(resolve, 300));
        expect((await client.listFiles(sessionId)).map((item) => item.path)).not.toContain("/workspace/finished");
      }
      length += event.data.length;
    }
    expect(length).toBe(6_000_000);
  });

  it("collected output is bounded", async () => {
    const result = await shared.client.exec(shared.sessionId, "head -c 100000 /dev/zero", { outputLimit: 1000 });
    expect([result.stdoutBytes.length, result.truncated]).toEqual([1000, true]);
  });

  it("the same exec id is the same command", async () => {
    const { client, sessionId } = shared;
    const options = { execId: "once-only" };
    const command = "echo x >> counted; cat counted";
    const both = await Promise.all([client.exec(sessionId, command, options), client.exec(sessionId, command, options)]);
    expect(both.map((item) => item.stdout)).toEqual(["x\n", "x\n"]);
  });

  it("a running command can be killed from elsewhere", async () => {
    const { client, sessionId } = shared;
    const running = client.exec(sessionId, "echo $$ > pid; sleep 60", { execId: "to-be-killed" });
    await eventually(async () => (await client.execs(sessionId)).some((item) => item.execId === "to-be-killed"));
    await client.kill(sessionId, "to-be-killed");
    expect((await running).status).toBe("killed");
  });

  it("an aborted command is killed, and says so", async () => {
    const { client, sessionId } = shared;
    const controller = new AbortController();
    const running = client.exec(sessionId, "sleep 60", { execId: "aborted", signal: controller.signal });
    const failing = failure(running);
    await eventually(async () => (await client.execs(sessionId)).some((item) => item.execId === "aborted"));
    controller.abort(new Error("enough"));
    const error = await failing;
    expect(error).toBeInstanceOf(errors.Aborted);
    expect(error).toMatchObject({ name: "AbortError", code: "aborted", cause: new Error("enough") });
    expect((error as errors.K8eError).hint).not.toBe("");
    expect((await client.execs(sessionId)).find((item) => item.execId === "aborted")?.status).toBe("killed");
  });

  it("an aborted stream ends with the same error, and its command is killed", async () => {
    const { client, sessionId } = shared;
    const controller = new AbortController();
    const error = await failure(async () => {
      for await (const chunk of client.execStream(sessionId, "echo begun; sleep 60", {
        execId: "aborted-stream",
        signal: controller.signal,
      })) {
        expect(chunk).toBe("begun\n");
        controller.abort();
      }
    });
    expect(error).toBeInstanceOf(errors.Aborted);
    expect((await client.execs(sessionId)).find((item) => item.execId === "aborted-stream")?.status).toBe("killed");
  });

  it("a signal that is aborted already starts nothing", async () => {
    const { client, sessionId } = shared;
    const error = await failure(client.exec(sessionId, "true", { execId: "never", signal: AbortSignal.abort() }));
    expect(error).toBeInstanceOf(errors.Aborted);
    expect((await client.execs(sessionId)).map((item) => item.execId)).not.toContain("never");
  });

  it("a call above its time is an error of its own", async () => {
    const { client, sessionId } = shared;
    const error = await failure(client.exec(sessionId, "sleep 60", { requestTimeout: 0.3, execId: "late" }));
    expect(error).toBeInstanceOf(errors.TimedOut);
    expect((await client.execs(sessionId)).find((item) => item.execId === "late")?.status).toBe("killed");
  });

  it("many calls at once share a client", async () => {
    const { client, sessionId } = shared;
    const results = await Promise.all(Array.from({ length: 30 }, (_, n) => client.exec(sessionId, ["echo", String(n)])));
    expect(results.map((item) => item.stdout)).toEqual(Array.from({ length: 30 }, (_, n) => `${n}\n`));
  });

  it("processes of a sandbox are told", async () => {
    const { client, sessionId } = shared;
    const run = await client.start(sessionId, ["sleep", "60"]);
    await eventually(async () => (await client.processes(sessionId)).some((item) => item.comm === "sleep" && item.pid > 1));
    await run.kill();
  });
});

it("run makes one session that ends with the client", async () => {
  const client = new SandboxClient(endpoint);
  const [first, second] = [await client.run("echo one > kept"), await client.run("cat kept")];
  expect(second.stdout).toBe("one\n");
  expect(first.sessionId).toBe(second.sessionId);
  await client.close();
  const other = new SandboxClient(endpoint);
  expect((await other.listSessions()).map((item) => item.sessionId)).not.toContain(first.sessionId);
  await other.close();
  expect(await failure(client.run("true"))).toBeInstanceOf(errors.ClientClosed);
});

it("run makes a new session when its own is gone", async () => {
  const client = new SandboxClient(endpoint);
  const { sessionId } = await client.run("true");
  await client.destroySession(sessionId);
  expect((await client.run("echo again")).stdout).toBe("again\n");
  await client.close();
});

it("the session of a tenant outlives the client", async () => {
  const client = new SandboxClient(endpoint, "tenant-of-typescript");
  const { sessionId } = await client.run("true");
  await client.close();
  const other = new SandboxClient({ endpoint, tenantId: "tenant-of-typescript" });
  expect((await other.run("true")).sessionId).toBe(sessionId);
  await other.destroySession(sessionId);
  await other.close();
});

it("closing a client ends what somebody still iterates over", async () => {
  const client = new SandboxClient(endpoint);
  const sessionId = await client.createSession();
  const events = client.execEvents(sessionId, "echo begun; sleep 60", { execId: "open-stream" });
  await events.next();
  await client.close();
  const other = new SandboxClient(endpoint);
  const exit = (await all(other.getRun(`${sessionId}.open-stream`).output())).at(-1) as Exit;
  expect(exit.status).toBe("killed");
  await other.destroySession(sessionId);
  await other.close();
});
