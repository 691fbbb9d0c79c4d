/** Certificates of logins renew themselves, once, and nobody waits or fails for it. */

import { execFile, execFileSync } from "node:child_process";
import { createPrivateKey, X509Certificate } from "node:crypto";
import { chownSync, mkdtempSync, readdirSync, readFileSync, rmSync, statSync, utimesSync, writeFileSync } from "node:fs";
import { createSecureServer, type Http2SecureServer, type ServerHttp2Stream } from "node:http2";
import type { AddressInfo } from "node:net";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { promisify } from "node:util";

import { create, toBinary } from "@bufbuild/protobuf";
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, it, vi } from "vitest";

import type { Endpoint } from "../src/endpoints.ts";
import { LoginResponseSchema } from "../src/generated/sandbox_pb.ts";
import { message } from "../src/grpc.ts";
import { errors, SandboxClient } from "../src/index.ts";
import { Channel } from "../src/remote.ts";
import * as renewal from "../src/renewal.ts";
import { caFile, endpoint, eventually, failure, grpc, ownPlace, python, withEnvironment } from "./gateway.ts";

const K8E = ["-P", "-m", "k8e", "sandbox"];
const NAME = "renewing-typescript";
const PAST = "1000000000\nmy laptop ü\n";
const NONE = Object.fromEntries(Object.keys(process.env).flatMap((name) => (/^K8E_(?!TEST)/.test(name) ? [[name, undefined]] : [])));
let home: string;
let folder: string;
let away: Endpoint;
let saved: Map<string, Buffer>;
const admin = new SandboxClient(endpoint);
const byAdmin = { ...process.env, ...ownPlace, K8E_SANDBOX_ENDPOINT: endpoint };

/** The machine that has logged in, to which all of this happens. */
const there = <T>(work: () => Promise<T>): Promise<T> =>
  withEnvironment({ ...NONE, HOME: home, K8E_DATA_DIR: home, K8E_RUN_DIR: home }, work);

beforeAll(() => {
  home = mkdtempSync(join(tmpdir(), "k8e-typescript-"));
  const made = execFileSync(python, [...K8E, "api-key", "create", NAME], { env: byAdmin, encoding: "utf8" });
  const login = [...K8E, "login", "--endpoint", grpc, "--apikey-file", "-", "--profile", "work"];
  const { key } = JSON.parse(made) as { key: string };
  execFileSync(python, login, { env: { PATH: process.env.PATH, HOME: home, K8E_SANDBOX_CERT: caFile }, input: key });
  folder = join(home, ".k8e/sandbox/profiles/work");
  saved = new Map(readdirSync(folder).map((name) => [name, readFileSync(join(folder, name))]));
});

beforeEach(() => {
  away = { socket: "", target: grpc, apiKey: "", certDir: folder, profile: "work" };
  for (const [name, content] of saved) put(name, content);
});

afterEach(() => {
  vi.restoreAllMocks();
  expect(readdirSync(folder).sort()).toEqual([...saved.keys()].sort());
});

afterAll(async () => {
  execFileSync(python, [...K8E, "api-key", "delete", NAME], { env: byAdmin });
  rmSync(home, { recursive: true });
  await admin.close();
});

const put = (name: string, content: string | Buffer): void => {
  writeFileSync(join(folder, name), content, { mode: 0o600 });
};
const get = (name: string): string => readFileSync(join(folder, name), "utf8");
const serial = (): string => new X509Certificate(get("client.crt")).serialNumber;
const due = (): number => Number.parseFloat(get("renew_at"));
const logins = async (): Promise<string[]> => {
  const rows = await admin.audit({ action: "key.login" });
  return rows.filter((row) => row.principal.includes(NAME)).map((row) => String(row.detail.device));
};
const warnings = (): string[] => {
  const told: string[] = [];
  vi.spyOn(process, "emitWarning").mockImplementation((text) => void told.push(String(text)));
  return told;
};

describe("the certificate of a login", () => {
  it("is renewed by a program that uses it when it is due, and not before", async () => {
    const key = get("client.key");
    const before = serial();
    const use = async (): Promise<void> => {
      await using client = new SandboxClient({ profile: "work" });
      expect(await client.status()).toMatchObject({ roles: ["agent"] });
    };
    await there(use);
    expect(serial()).toBe(before);
    put("renew_at", PAST);
    await there(use);
    await eventually(() => serial() !== before);
    await eventually(() => due() > Date.now() / 1000);
    expect(due() - Date.now() / 1000).toBeCloseTo(20 * 24 * 3600, -4); // of 30 days
    expect(get("client.key")).toBe(key);
    expect(new X509Certificate(get("client.crt")).checkPrivateKey(createPrivateKey(key))).toBe(true);
    await eventually(() => !readdirSync(folder).includes("renewing"));
    for (const name of readdirSync(folder)) expect(statSync(join(folder, name)).mode & 0o777).toBe(0o600);
    await there(use);
    expect((await logins()).at(-1)).toBe("my laptop ü");
  });

  it("is renewed once by many who find it due, of whichever language", async () => {
    put("renew_at", PAST);
    const before = (await logins()).length;
    const code =
      "import sys; from k8e.client import renewal; from k8e.client.endpoints import Endpoint; " +
      "renewal.renew(Endpoint(target=sys.argv[1], cert_dir=sys.argv[2]))";
    await there(async () => {
      const theirs = promisify(execFile)(python, ["-P", "-c", code, grpc, folder]);
      const ours = Promise.all(Array.from({ length: 8 }, () => renewal.begin(away)));
      await Promise.all([theirs, ours]);
    });
    expect((await logins()).length).toBe(before + 1);
  });

  it("is left to who is at it, but not for ever", async () => {
    const before = serial();
    const lock = join(folder, "renewing");
    put("renew_at", PAST);
    writeFileSync(lock, "");
    expect(await there(() => renewal.begin(away))).toBe(false);
    expect(serial()).toBe(before);
    utimesSync(lock, Date.now() / 1000 - 240, Date.now() / 1000 - 240);
    expect(await there(() => renewal.begin(away))).toBe(true);
    expect(serial()).not.toBe(before);
  });

  it("that cannot be renewed is used until its end, and it is tried again later", async () => {
    put("renew_at", PAST);
    const before = serial();
    const told = warnings();
    expect(await there(() => renewal.begin({ ...away, target: "127.0.0.1:1" }))).toBe(false);
    expect(told.join()).toContain("could not be renewed");
    expect(serial()).toBe(before);
    expect(due() - Date.now() / 1000).toBeCloseTo(3600, -2);
    expect(get("renew_at").split("\n")[1]).toBe("my laptop ü");
  });

  it.each(["never\n", "", "x\n", "99999999999\n"])("is not renewed where the plan says %j", async (text) => {
    put("renew_at", text);
    expect(await there(() => renewal.isDue(away))).toBe(false);
  });

  it("is renewed only where it is ours, and shown", async () => {
    put("renew_at", PAST);
    expect(await there(() => renewal.isDue(away))).toBe(true);
    for (const other of [{ apiKey: "k" }, { certDir: "" }, { target: "" }]) {
      expect(await there(() => renewal.isDue({ ...away, ...other }))).toBe(false);
    }
    const own = { K8E_SANDBOX_CERT: "a", K8E_SANDBOX_KEY: "b" };
    expect(await there(() => withEnvironment(own, () => renewal.isDue(away)))).toBe(false);
    chownSync(join(folder, "client.crt"), 12345, 12345);
    expect(await there(() => renewal.isDue(away))).toBe(false);
    chownSync(join(folder, "client.crt"), process.getuid?.() ?? 0, process.getgid?.() ?? 0);
  });

  it("is the new one for what begins later in a program that lives long", async () => {
    const channel = new Channel(away);
    const used = async (): Promise<unknown> => {
      const connection = await channel.connect();
      expect(connection.usable).toBe(true);
      const session = await (Reflect.get(channel, "session") as Promise<{ socket: { getCertificate(): { serialNumber: string } } }>);
      return { connection, serial: session.socket.getCertificate().serialNumber };
    };
    interface Used { connection: { usable: boolean; close(): void }; serial: string }
    const first = (await there(used)) as Used;
    expect(first.serial).toBe(serial());
    put("renew_at", PAST);
    const real = Date.now.bind(Date);
    vi.spyOn(Date, "now").mockImplementation(() => real() + 3_700_000);
    expect(first.connection.usable).toBe(false);
    const second = (await there(used)) as Used; // which has it renewed
    await eventually(() => serial() !== first.serial && due() > real() / 1000);
    await eventually(() => !readdirSync(folder).includes("renewing"));
    vi.spyOn(Date, "now").mockImplementation(() => real() + 7_400_000);
    const third = (await there(used)) as Used;
    expect(third.serial).toBe(serial());
    expect(third.serial).not.toBe(first.serial);
    for (const { connection } of [first, second, third]) connection.close();
    channel.close();
  });

  it("that does not fit its key is an error, and is read again", async () => {
    put("client.key", readFileSync(join(dirname(caFile), "server.key")));
    await there(async () => {
      await using client = new SandboxClient({ profile: "work" });
      expect(await failure(client.status())).toBeInstanceOf(errors.GatewayUnreachable);
      for (const [name, content] of saved) put(name, content);
      expect(await client.status()).toMatchObject({ roles: ["agent"] });
    });
  });
});

describe("a gateway that answers a renewal", () => {
  let server: Http2SecureServer | undefined;
  let onLogin: (stream: ServerHttp2Stream) => void;

  beforeEach(async () => {
    const tls = dirname(caFile);
    const [key, cert] = [readFileSync(join(tls, "server.key")), readFileSync(join(tls, "server.crt"))];
    server = createSecureServer({ key, cert });
    server.on("stream", (stream) => {
      onLogin(stream);
    });
    await new Promise<void>((resolve) => server?.listen(0, "127.0.0.1", resolve));
    away = { ...away, target: `127.0.0.1:${(server.address() as AddressInfo).port}` };
    put("renew_at", PAST);
  });

  afterEach(() => {
    server?.close();
  });

  const answer = (stream: ServerHttp2Stream, cert: string): void => {
    stream.respond({ "content-type": "application/grpc" }, { waitForTrailers: true });
    stream.on("wantTrailers", () => {
      stream.sendTrailers({ "grpc-status": "0" });
    });
    const fields = { cert, validDays: 30n };
    for (const part of message(toBinary(LoginResponseSchema, create(LoginResponseSchema, fields)))) stream.write(part);
    stream.end();
  };

  it("while there is another login changes nothing of that", async () => {
    const other = readFileSync(join(dirname(caFile), "server.key"));
    const cert = get("client.crt");
    onLogin = (stream) => {
      put("client.key", other);
      answer(stream, cert);
    };
    expect(await there(() => renewal.begin(away))).toBe(false);
    expect(readFileSync(join(folder, "client.key")).equals(other)).toBe(true);
    expect(get("renew_at")).toBe(PAST);
  });

  it.each([
    ["another's certificate", () => readFileSync(caFile, "utf8")],
    ["no certificate", () => "nonsense"],
  ])("with %s changes nothing", async (_, cert) => {
    const before = get("client.crt");
    const told = warnings();
    onLogin = (stream) => {
      answer(stream, cert());
    };
    expect(await there(() => renewal.begin(away))).toBe(false);
    expect(get("client.crt")).toBe(before);
    expect(told).toHaveLength(1);
  });

  it("by a refusal, or without end, changes nothing", async () => {
    const before = get("client.crt");
    const told = warnings();
    onLogin = (stream) => {
      stream.respond({ "grpc-status": "7", "grpc-message": "no%20more" }, { endStream: true });
    };
    expect(await there(() => renewal.begin(away))).toBe(false);
    expect(told.at(-1)).toContain("no more");
    put("renew_at", PAST);
    onLogin = (stream) => {
      stream.respond({ "content-type": "application/grpc" });
      const more = (): void => {
        if (!stream.destroyed) stream.write(Buffer.alloc(1 << 20), more);
      };
      stream.on("error", () => undefined);
      more();
    };
    expect(await there(() => renewal.begin(away))).toBe(false);
    expect(get("client.crt")).toBe(before);
    expect(told).toHaveLength(2);
  });
});
