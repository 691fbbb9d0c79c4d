/** What goes wrong between here and a gateway: each has an error class of its own, which says what to do next. */

import { execFileSync } from "node:child_process";
import { chmodSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { createServer as createTls } from "node:https";
import { createServer, type Server, type Socket } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";

import { afterAll, afterEach, beforeAll, describe, expect, it } from "vitest";

import { errors, SandboxClient } from "../src/index.ts";
import * as wire from "../src/wire.ts";
import { all, caFile, endpoint, eventually, failure, grpc, ownPlace, python, runtimes, withEnvironment } from "./gateway.ts";

/** Checks an error that says what happened and what to do next. */
function told(error: Error, kind: abstract new (...given: never[]) => errors.K8eError): errors.K8eError {
  expect(error).toBeInstanceOf(kind);
  const known = error as errors.K8eError;
  expect(known.reason).not.toBe("");
  expect(known.hint).not.toBe("");
  return known;
}

const OTHERS = Object.fromEntries(Object.keys(process.env).flatMap((name) => (/^K8E_(?!TEST)/.test(name) ? [[name, undefined]] : [])));

describe("a gateway that cannot be used", () => {
  it("is not there, at a socket that was named", async () => {
    const client = new SandboxClient("unix:/tmp/there-is-no-gateway/gateway.sock");
    told(await failure(client.status()), errors.NoGateway);
    await client.close();
  });

  it("is not there, and none can be started", async () => {
    const nowhere = mkdtempSync(join(tmpdir(), "k8e-typescript-"));
    const environment = { ...OTHERS, HOME: nowhere, PATH: nowhere, K8E_HOME: nowhere, K8E_RUN_DIR: join(nowhere, "run") };
    await withEnvironment(environment, async () => {
      const client = new SandboxClient();
      const error = await failure(client.run("true"));
      // Where root installed k8e for everybody, that one is tried.
      told(error, errors.NoGateway);
      await client.close();
    });
    rmSync(nowhere, { recursive: true });
  });

  it("is elsewhere, and nobody listens there", async () => {
    const client = new SandboxClient("127.0.0.1:1");
    told(await failure(client.status()), errors.GatewayUnreachable);
    await client.close();
  });

  it("does not answer, and is given up as soon as a signal or the time-out says so", async () => {
    const server = createServer((socket) => void held.push(socket)); // which never says a word
    const held: Socket[] = [];
    await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
    const { port } = server.address() as { port: number };
    const client = new SandboxClient({ endpoint: `127.0.0.1:${port}`, requestTimeout: 0.2 });
    const controller = new AbortController();
    const aborted = failure(client.exec("s", "true", { signal: controller.signal, requestTimeout: 0 }));
    told(await failure(client.status()), errors.TimedOut);
    told(await failure(client.exec("s", "true")), errors.TimedOut);
    controller.abort();
    told(await aborted, errors.Aborted);
    await client.close();
    for (const socket of held) socket.destroy();
    server.close();
  });

  it("has a certificate that is not trusted", async () => {
    await withEnvironment({ ...OTHERS, K8E_DATA_DIR: "/nowhere", HOME: "/nowhere" }, async () => {
      const client = new SandboxClient(grpc);
      const error = told(await failure(client.status()), errors.UntrustedGateway);
      expect(error.hint).toContain("K8E_SANDBOX_CERT");
      await client.close();
    });
  });

  it("refuses the key", async () => {
    await withEnvironment({ ...OTHERS, K8E_SANDBOX_CERT: caFile }, async () => {
      for (const apiKey of [`k8e-${"0".repeat(64)}`, "nonsense"]) {
        const client = new SandboxClient({ endpoint: grpc, apiKey });
        const error = told(await failure(client.status()), errors.KeyRefused);
        expect(error.hint).toContain("api-key create");
        await client.close();
      }
      const odd = new SandboxClient({ endpoint: grpc, apiKey: "häßlich" });
      told(await failure(odd.status()), errors.InvalidRequest);
    });
  });

  it("is something else that talks TLS", async () => {
    const pem = execFileSync("openssl", ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
      "-keyout", "-", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2"], { encoding: "utf8", stdio: ["ignore", "pipe", "ignore"] });
    const folder = mkdtempSync(join(tmpdir(), "k8e-typescript-"));
    writeFileSync(join(folder, "cert.pem"), pem);
    const server = createTls({ key: pem, cert: pem }, (_, answer) => answer.end("hello"));
    await new Promise<void>((resolve) => server.listen(0, "localhost", resolve));
    const { port } = server.address() as { port: number };
    await withEnvironment({ ...OTHERS, K8E_SANDBOX_CERT: join(folder, "cert.pem") }, async () => {
      const client = new SandboxClient(`localhost:${port}`);
      told(await failure(client.status()), errors.GatewayUnreachable);
      await client.close();
    });
    server.close();
    server.closeAllConnections();
    rmSync(folder, { recursive: true });
  });
});

describe("a gateway elsewhere", () => {
  let client: SandboxClient;
  beforeAll(async () => {
    client = await withEnvironment({ ...OTHERS, K8E_SANDBOX_CERT: caFile }, async () => {
      const made = new SandboxClient(grpc);
      await made.status();
      return made;
    });
  });
  afterAll(async () => {
    await client.close();
  });

  it.each(runtimes)("does the same as one of this machine (%s)", async (runtimeClass) => {
    const sessionId = await client.createSession({ runtimeClass });
    const result = await client.exec(sessionId, "cat; echo err >&2; exit 3", { stdin: "in" });
    expect(result).toMatchObject({ stdout: "in", stderr: "err\n", exitCode: 3 });
    const large = Buffer.alloc(5 << 20, "z");
    expect(await client.writeFile(sessionId, "large", large)).toBe(large.length);
    expect(Buffer.compare(await client.readBytes(sessionId, "large"), large)).toBe(0);
    expect(await all(client.execStream(sessionId, "echo a"))).toEqual(["a\n"]);
    expect((await failure(client.readFile(sessionId, "none"))) as errors.FileError).toMatchObject({ code: "ENOENT" });
    const many = await Promise.all(Array.from({ length: 20 }, (_, n) => client.exec(sessionId, ["echo", String(n)])));
    expect(many.map((item) => item.stdout)).toEqual(Array.from({ length: 20 }, (_, n) => `${n}\n`));
    const program = await client.open(sessionId, ["cat"]);
    await program.write("x\n");
    expect(Buffer.from(await program.readUntil("\n")).toString()).toBe("x\n");
    await program.close();
    const execId = "remote-aborted";
    const controller = new AbortController();
    const running = failure(client.exec(sessionId, "sleep 60", { execId, signal: controller.signal }));
    await eventually(async () => (await client.execs(sessionId)).some((item) => item.execId === execId));
    controller.abort();
    expect(await running).toBeInstanceOf(errors.Aborted);
    await client.destroySession(sessionId);
  });

  it("takes an API key and a client certificate", async () => {
    const admin = new SandboxClient(endpoint);
    const name = "of-typescript";
    const environment = { ...OTHERS, ...ownPlace, K8E_SANDBOX_ENDPOINT: endpoint };
    const made = JSON.parse(
      execFileSync(python, ["-P", "-m", "k8e", "sandbox", "api-key", "create", name], { env: { ...process.env, ...environment }, encoding: "utf8" }),
    ) as { key: string };
    await withEnvironment({ ...OTHERS, K8E_SANDBOX_CERT: caFile }, async () => {
      const keyed = new SandboxClient({ endpoint: grpc, apiKey: made.key });
      expect(await keyed.status()).toMatchObject({ roles: ["agent"] });
      const error = told(await failure(keyed.pool()), errors.Denied);
      expect(error).not.toBeInstanceOf(errors.KeyRefused);
      await keyed.close();
    });

    // A login, by the command; what it leaves is a profile, which finds the certificate.
    const home = mkdtempSync(join(tmpdir(), "k8e-typescript-"));
    const login = ["-P", "-m", "k8e", "sandbox", "login", "--endpoint", grpc, "--apikey-file", "-", "--profile", "work"];
    execFileSync(python, login, { env: { PATH: process.env.PATH, HOME: home, K8E_SANDBOX_CERT: caFile }, input: made.key });
    await withEnvironment({ ...OTHERS, HOME: home, K8E_DATA_DIR: home, K8E_RUN_DIR: home }, async () => {
      for (const own of [new SandboxClient(), new SandboxClient({ profile: "work" })]) {
        expect(await own.status()).toMatchObject({ caller: expect.stringContaining(name) as string, roles: ["agent"] });
        await own.close();
      }
    });
    rmSync(home, { recursive: true });
    execFileSync(python, ["-P", "-m", "k8e", "sandbox", "api-key", "delete", name], { env: { ...process.env, ...environment } });
    await admin.close();
  });
});

// A gateway that tests play, on a socket.

type Play = (socket: Socket, kind: number, channel: number, body: Buffer) => void;

class Played {
  readonly folder = mkdtempSync(join(tmpdir(), "k8e-typescript-"));
  readonly path = join(this.folder, "gateway.sock");
  calls = 0;
  private server: Server | undefined;

  async serve(...plays: Play[]): Promise<void> {
    let connections = 0;
    this.server = createServer((socket) => {
      const play = plays[Math.min(connections, plays.length - 1)];
      connections += 1;
      const splitter = new wire.Splitter(wire.MAX_REQUEST, (kind, channel, body) => {
        if (kind === wire.CALL) this.calls += 1;
        play?.(socket, kind, channel, body);
      });
      socket.on("error", () => undefined);
      socket.on("data", (data) => {
        splitter.feed(data);
      });
    });
    await new Promise<void>((resolve) => this.server?.listen(this.path, resolve));
  }

  close(): void {
    this.server?.close();
    rmSync(this.folder, { recursive: true });
  }
}

const frame = (kind: number, channel: number, value: wire.Packable): Buffer => {
  const body = wire.pack(value);
  return Buffer.concat([wire.header(body.length, kind, channel), body]);
};

const answering: Play = (socket, kind, channel) => {
  if (kind === wire.CALL) socket.write(frame(wire.RESULT, channel, { version: "1" }));
};

describe("a gateway that goes away", () => {
  const played: Played[] = [];
  const play = async (...plays: Play[]): Promise<Played> => {
    const made = new Played();
    played.push(made);
    await made.serve(...plays);
    return made;
  };
  afterEach(() => {
    for (const made of played.splice(0)) made.close();
  });

  const goodbye: Play = (socket, kind) => {
    if (kind !== wire.CALL) return;
    socket.end(Buffer.concat([wire.header(4, wire.GOODBYE, 0), wire.creditBody(0)]));
  };

  it("and says that it did not read the call, gets it again", async () => {
    const gateway = await play(goodbye, answering);
    const client = new SandboxClient(`unix:${gateway.path}`);
    expect((await client.status()).version).toBe("1");
    expect(gateway.calls).toBe(2);
    await client.close();
  });

  it("and may have read the call, never gets it again", async () => {
    const gateway = await play((socket, kind) => {
      if (kind === wire.CALL) socket.end();
    }, answering);
    const client = new SandboxClient(`unix:${gateway.path}`);
    const error = told(await failure(client.status()), errors.ConnectionLost);
    expect((error as errors.ConnectionLost).unread).toBe(false);
    expect(gateway.calls).toBe(1);
    expect((await client.status()).version).toBe("1"); // and the client goes on
    await client.close();
  });

  it("again and again, is given up", async () => {
    const gateway = await play(goodbye);
    const client = new SandboxClient(`unix:${gateway.path}`);
    told(await failure(client.status()), errors.ConnectionLost);
    expect(gateway.calls).toBe(4);
    await client.close();
  });

  it("or is none, is told", async () => {
    const gateway = await play((socket) => socket.write("HTTP/1.1 400 Bad Request\r\n\r\n"));
    const client = new SandboxClient(`unix:${gateway.path}`);
    told(await failure(client.status()), errors.GuestFailed);
    await client.close();
  });

  it("or is slow: the time-out of a client is for the start of a program, not for its whole run", async () => {
    let begin = false;
    const gateway = await play((socket, kind, channel, body) => {
      const op = kind === wire.CALL ? wire.unpackDict(body).op : "";
      if (op === "signal") socket.write(frame(wire.RESULT, channel, {}));
      if (op !== "exec" || !begin) return;
      socket.write(frame(wire.RESULT, channel, { session_id: "s", id: "e" }));
      setTimeout(() => socket.write(frame(wire.EXIT, channel, { code: 7, status: "completed", signal: 0, duration_ms: 1, truncated: false })), 400);
    });
    const client = new SandboxClient({ endpoint: `unix:${gateway.path}`, requestTimeout: 0.2 });
    const silent = failure(client.exec("s", "x"));
    await eventually(() => Promise.resolve(gateway.calls === 1));
    begin = true;
    const program = client.open("s", ["x"]);
    expect((await client.exec("s", "x")).exitCode).toBe(7);
    expect((await (await program).wait()).exitCode).toBe(7);
    told(await silent, errors.TimedOut);
    await client.close();
  });

  it("is asked for the rest of the output, which has numbers", async () => {
    const out = (channel: number, seq: number, text: string): Buffer => {
      const body = Buffer.concat([Buffer.alloc(8), Buffer.from(text)]);
      body.writeUInt32BE(seq, 4);
      return Buffer.concat([wire.header(body.length, wire.OUT, channel), body]);
    };
    const seen: wire.Dict[] = [];
    const gateway = await play(
      (socket, kind, channel, body) => {
        if (kind !== wire.CALL) return;
        seen.push(wire.unpackDict(body));
        socket.end(Buffer.concat([frame(wire.RESULT, channel, { session_id: "s", id: "e" }), out(channel, 0, "one ")]));
      },
      (socket, kind, channel, body) => {
        if (kind !== wire.CALL) return;
        seen.push(wire.unpackDict(body));
        const exit = { code: 0, status: "completed", signal: 0, duration_ms: 1, truncated: false };
        socket.write(
          Buffer.concat([
            frame(wire.RESULT, channel, { session_id: "s", id: "e" }),
            out(channel, 4, "two"),
            frame(wire.EXIT, channel, exit),
          ]),
        );
      },
    );
    const client = new SandboxClient(`unix:${gateway.path}`);
    expect((await client.exec("s", "x")).stdout).toBe("one two");
    expect(seen.map((call) => [call.op, call.seq])).toEqual([["exec", undefined], ["attach", 4]]);
    await client.close();
  });
});

describe("a gateway of one's own", () => {
  const cli = (...words: string[]): Record<string, unknown> =>
    JSON.parse(execFileSync(python, ["-P", "-m", "k8e", ...words], { env: { ...process.env, ...ownPlace }, encoding: "utf8" })) as Record<
      string,
      unknown
    >;

  afterAll(() => {
    cli("gateway", "stop", "--destroy");
  });

  it("is started where none runs, once, and taken up again after it was killed", async () => {
    const bin = mkdtempSync(join(tmpdir(), "k8e-typescript-"));
    // As install.sh writes the command.
    writeFileSync(join(bin, "k8e"), `#!/bin/sh\n# The command k8e, written by install.sh\nexec '${python}' -P -m k8e "$@"\n`);
    chmodSync(join(bin, "k8e"), 0o755);
    const environment = { ...OTHERS, ...ownPlace, K8E_HOME: undefined, PATH: `${bin}:${process.env.PATH ?? ""}` };
    await withEnvironment(environment, async () => {
      const clients = [new SandboxClient(), new SandboxClient()];
      const both = await Promise.all(clients.map((one) => one.status()));
      expect(both[0]?.pid).toBe(both[1]?.pid);
      const [client] = clients as [SandboxClient, SandboxClient];
      const sessionId = await client.createSession({ runtimeClass: "container" });

      // In the middle of a command.
      await client.exec(sessionId, ["mkfifo", "gate"]);
      const running = client.exec(sessionId, "echo before; read go < gate; echo after", { timeout: 120, execId: "survivor" });
      await eventually(async () => (await client.getRun(`${sessionId}.survivor`).poll()).stdout === "before\n");
      process.kill(Number(both[0]?.pid), "SIGKILL");
      await eventually(async () => (await failureOrNothing(client.status())) === undefined, 60);
      await client.exec(sessionId, "echo go > gate");
      expect(await running).toMatchObject({ stdout: "before\nafter\n", exitCode: 0 });

      // In the middle of one that cannot be taken up again.
      const fed = failure(client.exec(sessionId, "echo begun; cat", { stdin: endless(), execId: "fed" }));
      await eventually(async () => (await client.execs(sessionId)).some((item) => item.execId === "fed"));
      process.kill(Number((await client.status()).pid), "SIGKILL");
      const error = told(await fed, errors.ProgramLost) as errors.ProgramLost;
      expect(error).toMatchObject({ sessionId, execId: "fed" });
      expect(error.hint).toContain(`getRun("${sessionId}.fed")`);
      await eventually(async () => (await failureOrNothing(client.status())) === undefined, 60);
      await client.getRun(`${sessionId}.fed`).kill();
      await client.destroySession(sessionId);
      await Promise.all(clients.map((one) => one.close()));
    });
    rmSync(bin, { recursive: true });
  });
});

async function failureOrNothing(work: Promise<unknown>): Promise<unknown> {
  try {
    await work;
    return undefined;
  } catch (error) {
    return error;
  }
}

async function* endless(): AsyncGenerator<string> {
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, 50));
    yield "x";
  }
}

describe("a slow consumer", () => {
  it("of a gibibyte of output needs no more memory", async () => {
    const client = new SandboxClient(endpoint);
    const sessionId = await client.createSession({ runtimeClass: "container" });
    globalThis.gc?.();
    const before = process.memoryUsage().rss;
    let most = 0;
    let count = 0;
    let paused = 0;
    for await (const event of client.execEvents(sessionId, "dd if=/dev/zero bs=1M count=1024 status=none", 120)) {
      if (event.type === "exit") break;
      count += event.data.length;
      if (count - paused < 4 << 20) continue;
      paused = count;
      await new Promise((resolve) => setTimeout(resolve, 4)); // slower than the program
      most = Math.max(most, process.memoryUsage().rss - before);
    }
    expect(count).toBe(2 ** 30);
    expect(most).toBeLessThan(96 << 20);
    await client.destroySession(sessionId);
    await client.close();
  }, 120_000);
});
