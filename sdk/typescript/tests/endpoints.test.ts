import { chmodSync, mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { hostname, tmpdir } from "node:os";
import { dirname, join } from "node:path";

import { afterEach, beforeEach, describe, expect, it } from "vitest";

import * as credentials from "../src/credentials.ts";
import { type Endpoint, parse, resolve } from "../src/endpoints.ts";
import { errors, SandboxClient } from "../src/index.ts";
import * as installations from "../src/installations.ts";
import { failure } from "./gateway.ts";

let home: string;
const before = { ...process.env };

beforeEach(() => {
  home = mkdtempSync(join(tmpdir(), "k8e-typescript-"));
  for (const name of Object.keys(process.env)) {
    if (/^(K8E_(?!TEST)|KUBECONFIG)/.test(name)) Reflect.deleteProperty(process.env, name);
  }
  process.env.HOME = home;
});

afterEach(() => {
  rmSync(home, { recursive: true });
  for (const name of Object.keys(process.env)) if (!(name in before)) Reflect.deleteProperty(process.env, name);
  Object.assign(process.env, before);
});

function write(name: string, text: string): string {
  const path = join(home, name);
  mkdirSync(dirname(path), { recursive: true });
  writeFileSync(path, text);
  return path;
}

const PROFILES = `
current_profile: usual
profiles:
  usual: {endpoint: "usual.example:1", api_key_file: key}
  other: {endpoint: "other.example:2", cert_dir: certs}
  folder: {cert_dir: certs}
  empty: {}
`;

describe("the endpoint", () => {
  it("is that of argument, environment, profile, current profile, or this machine's own", async () => {
    const found = async (options = {}): Promise<string> => {
      const { target, socket } = await resolve(options);
      return target || socket || "own";
    };
    expect(await found()).toBe("own");
    write(".k8e/sandbox/profiles.yaml", PROFILES);
    expect(await found()).toBe("usual.example:1");
    process.env.K8E_SANDBOX_PROFILE = "other";
    expect(await found()).toBe("other.example:2");
    expect(await found({ profile: "usual" })).toBe("usual.example:1");
    process.env.K8E_SANDBOX_ENDPOINT = "by.environment";
    expect(await found()).toBe("by.environment:50051");
    expect(await found({ endpoint: "unix:/by/argument" })).toBe("/by/argument");
  });

  it.each([
    ["gateway.example:1", "gateway.example:1", ""],
    ["gateway.example", "gateway.example:50051", ""],
    ["https://gateway.example:7", "gateway.example:7", ""],
    ["[::1]:5", "[::1]:5", ""],
    ["[::1]", "[::1]:50051", ""],
    ["unix:/a/b", "", "/a/b"],
    ["unix:///a/b", "", "/a/b"],
  ])("%s is understood", (text, target, socket) => {
    expect(parse(text)).toMatchObject({ target, socket });
  });

  it.each(["gateway:port", ":5"])("%s is refused, at once", (text) => {
    expect(() => new SandboxClient(text)).toThrow(errors.InvalidRequest);
  });

  it("gets what its own profile has to show", async () => {
    write(".k8e/sandbox/profiles.yaml", PROFILES);
    write(".k8e/sandbox/key", "key-of-usual\n");
    write(".k8e/sandbox/certs/endpoint", "in.folder:3\n");
    expect(await resolve({})).toMatchObject({ apiKey: "key-of-usual", profile: "usual" });
    expect(await resolve({ apiKey: "mine" })).toMatchObject({ apiKey: "mine" });
    expect(await resolve({ endpoint: "elsewhere:1" })).toMatchObject({ apiKey: "", certDir: "" });
    expect(await resolve({ profile: "folder" })).toMatchObject({ target: "in.folder:3", certDir: join(home, ".k8e/sandbox/certs") });
    expect((await failure(resolve({ profile: "empty" }))).message).toContain("names no endpoint");
  });

  it("of an unknown profile is an error that names the known ones", async () => {
    write(".k8e/sandbox/profiles.yaml", PROFILES);
    const error = (await failure(resolve({ profile: "none" }))) as errors.InvalidRequest;
    expect(error.hint).toContain("empty, folder, other, usual");
  });

  it.each(["[", "- a", "profiles: 5", "profiles: {a: 5}", "current_profile: {}", "profiles: {a: {endpoint: 5}}"])(
    "of a broken file (%s) is an error that names it",
    async (text) => {
      const path = write("profiles.yaml", text);
      process.env.K8E_SANDBOX_CONFIG = path;
      const error = await failure(resolve({ profile: "a" }));
      expect(error).toBeInstanceOf(errors.InvalidRequest);
      expect(error.message).toContain(path);
    },
  );
});

describe("certificates", () => {
  const PEM = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----";
  const target: Endpoint = { socket: "", target: "gateway.example:1", apiKey: "", certDir: "", profile: "" };

  it("are found in one order", async () => {
    const certDir = dirname(write("certs/ca.crt", "ca of folder"));
    write("certs/client.crt", "certificate of folder");
    write("certs/client.key", "key of folder");
    const told = async (endpoint = target): Promise<(string | undefined)[]> => {
      const { ca, certificate, key } = await credentials.load(endpoint);
      return [ca, certificate, key].map((item) => item?.toString().trim());
    };
    expect(await told()).toEqual([undefined, undefined, undefined]);
    expect(await told({ ...target, certDir })).toEqual(["ca of folder", "certificate of folder", "key of folder"]);
    expect(await told({ ...target, certDir, apiKey: "k" })).toEqual(["ca of folder", undefined, undefined]);
    process.env.K8E_SANDBOX_CERT = write("cert", "given");
    expect(await told({ ...target, certDir })).toEqual(["given", "certificate of folder", "key of folder"]);
    process.env.K8E_SANDBOX_KEY = write("key", "key");
    expect(await told({ ...target, certDir })).toEqual(["ca of folder", "given", "key"]);
    process.env.K8E_SANDBOX_CA = write("ca", "ca");
    expect(await told()).toEqual(["ca", "given", "key"]);
  });

  it("of this machine's own gateway are for this machine", async () => {
    process.env.K8E_DATA_DIR = join(home, "data");
    write("data/tls/ca.crt", "own ca");
    const ca = async (host: string): Promise<string | undefined> =>
      (await credentials.load({ ...target, target: `${host}:1` })).ca?.toString();
    for (const host of ["localhost", "127.0.0.1", "[::1]", hostname()]) expect(await ca(host)).toMatch(/^own ca/); // and what K8E has here, if it does
    expect(await ca("gateway.example")).toBeUndefined();
  });

  it("of a kubeconfig count for the host of their cluster", async () => {
    const data = Buffer.from(`noise\n${PEM}\n`).toString("base64");
    const cluster = (host: string): string => `{cluster: {server: "https://${host}:6443", certificate-authority-data: "${data}"}}`;
    process.env.KUBECONFIG = write("config", `clusters: [${cluster("other.example")}, ${cluster("gateway.example")}]`);
    expect((await credentials.load(target)).ca?.toString()).toBe(`${PEM}\n`);
    expect((await credentials.load({ ...target, target: "none.example:1" })).ca).toBeUndefined();
  });

  it("that are named and not there are errors", async () => {
    process.env.K8E_SANDBOX_CA = join(home, "missing");
    expect(await failure(credentials.load(target))).toBeInstanceOf(errors.GatewayUnreachable);
  });
});

describe("installations", () => {
  it("are those of K8E_HOME, the usual places and PATH; others' are refused", () => {
    process.env.K8E_HOME = join(home, "k8e");
    const python = write("k8e/venv/bin/python", "");
    mkdirSync(join(home, "k8e/bin"));
    process.env.PATH = join(home, "path");
    write("path/k8e", "#!/bin/sh\n# The command k8e, written by install.sh\nexec '/none/bin/python3' -I\n");
    expect(installations.find().usable).toContainEqual({ python, home: join(home, "k8e") });
    chmodSync(python, 0o777);
    const { usable, refused } = installations.find();
    expect(usable.map((item) => item.python)).not.toContain(python);
    expect(refused.join()).toContain("other users may change");
  });
});
