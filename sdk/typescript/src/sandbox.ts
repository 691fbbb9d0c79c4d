/**
 * Sandboxes as objects.
 *
 * @module
 */

import { createHash } from "node:crypto";

import { type ClientOptions, SandboxClient, type SnapshotProgress, type TimeoutOr } from "./client.ts";
import type { Command, ExecOptions, Language } from "./commands.ts";
import type { CallOptions } from "./connections.ts";
import type { Content } from "./content.ts";
import type { Context, ContextLanguage, CreateContextOptions } from "./contexts.ts";
import type { Egress } from "./egress.ts";
import { InvalidRequest, SessionNotFound, TemplateNotFound } from "./errors.ts";
import type { Exposed } from "./exposures.ts";
import type { FileEntry, ListOptions, ReadOptions, WriteOptions } from "./files.ts";
import { CALL_NAMES, checkOptions, type Names, optionsOf } from "./options.ts";
import type { Process } from "./processes.ts";
import type { ExecEvent, ExecResult } from "./results.ts";
import type { OutputOptions, Run } from "./runs.ts";
import type { Limits, SessionInfo, SessionOptions } from "./sessions.ts";
import type { Snapshot } from "./snapshots.ts";
import type { Copied, CopyOptions } from "./trees.ts";

/** Options of a new sandbox. Limits can be given by themselves: `memory: "2G"`. */
export interface SandboxOptions
  extends Omit<SessionOptions, "runtimeClass">, Limits, Omit<ClientOptions, "tenantId" | "requestTimeout"> {
  /** `gvisor` or `container`; by default the best one that works. */
  runtime?: string | undefined;
  /**
   * The reference of an image that is its root file system, such as `registry.example/python:3.12`. A template is
   * kept for it, which needs the role `admin` the first time.
   */
  image?: string | undefined;
  /** The client to use; otherwise the sandbox has one of its own. */
  client?: SandboxClient | undefined;
}

const SANDBOX_NAMES: Names<SandboxOptions> = {
  ...CALL_NAMES,
  allowedHosts: true,
  apiKey: true,
  client: true,
  cpus: true,
  disk: true,
  endpoint: true,
  env: true,
  idleTimeout: true,
  image: true,
  inodes: true,
  labels: true,
  lifetime: true,
  limits: true,
  manifest: true,
  memory: true,
  openFiles: true,
  output: true,
  pids: true,
  profile: true,
  requestId: true,
  runtime: true,
  secrets: true,
  sessionId: true,
  snapshot: true,
  template: true,
  tenantId: true,
};

/** How to find an existing sandbox. */
export interface ConnectOptions extends ClientOptions, CallOptions {
  client?: SandboxClient | undefined;
}

/** The files of one sandbox. Paths are absolute, or relative to /workspace. */
export class SandboxFiles {
  private readonly client: SandboxClient;
  private readonly id: string;

  /** @internal */
  constructor(client: SandboxClient, id: string) {
    this.client = client;
    this.id = id;
  }

  /** A file as text; invalid UTF-8 is replaced. */
  read(path: string, options?: ReadOptions): Promise<string> {
    return this.client.readFile(this.id, path, options);
  }

  readBytes(path: string, options?: ReadOptions): Promise<Uint8Array> {
    return this.client.readBytes(this.id, path, options);
  }

  /** A file, piece by piece, in constant memory. */
  readChunks(path: string, options?: ReadOptions): AsyncGenerator<Uint8Array, void, void> {
    return this.client.readChunks(this.id, path, options);
  }

  /** A file as a web stream. */
  readStream(path: string, options?: ReadOptions): ReadableStream<Uint8Array> {
    return this.client.readStream(this.id, path, options);
  }

  /** Writes a file; returns the number of bytes. */
  write(path: string, content: Content, options?: WriteOptions): Promise<number> {
    return this.client.writeFile(this.id, path, content, options);
  }

  /** What is in a folder, folders too, and below it down to `depth`: 1 by default, 0 means all. */
  list(path = "/workspace", options: Omit<ListOptions, "path"> & { since?: number | undefined } = {}): Promise<FileEntry[]> {
    return this.client.listFiles(this.id, options.since, {
      ...options,
      path,
      depth: options.depth ?? 1,
      directories: options.directories ?? true,
    });
  }

  stat(path: string, options?: CallOptions & { follow?: boolean | undefined }): Promise<FileEntry> {
    return this.client.stat(this.id, path, options);
  }

  remove(path: string, options?: CallOptions & { recursive?: boolean | undefined }): Promise<void> {
    return this.client.remove(this.id, path, options);
  }

  rename(path: string, to: string, options?: CallOptions): Promise<void> {
    return this.client.rename(this.id, path, to, options);
  }

  mkdir(path: string, options?: CallOptions & { existOk?: boolean | undefined }): Promise<void> {
    return this.client.mkdir(this.id, path, options);
  }

  symlink(path: string, target: string, options?: CallOptions): Promise<void> {
    return this.client.symlink(this.id, path, target, options);
  }

  chmod(path: string, mode: number, options?: CallOptions): Promise<void> {
    return this.client.chmod(this.id, path, mode, options);
  }

  /** Makes `path` a copy of a local file or folder. */
  upload(source: string, path: string, options?: CopyOptions): Promise<Copied> {
    return this.client.upload(this.id, source, path, options);
  }

  /** Makes a local file or folder a copy of one in the sandbox. */
  download(path: string, target: string, options?: CopyOptions): Promise<Copied> {
    return this.client.download(this.id, path, target, options);
  }
}

/**
 * One sandbox.
 *
 * ```ts
 * await using sandbox = await Sandbox.create({ memory: "2G", allowedHosts: ["pkg.test"] });
 * console.log((await sandbox.run("print(1 + 1)", "python")).stdout);
 * ```
 */
export class Sandbox implements AsyncDisposable {
  readonly id: string;
  readonly client: SandboxClient;
  readonly files: SandboxFiles;
  private readonly ownsClient: boolean;
  private readonly isMade: boolean;

  private constructor(client: SandboxClient, id: string, owns: { client: boolean; sandbox: boolean }) {
    if ((client as unknown) === undefined) {
      throw new InvalidRequest("a sandbox is not made by new", { hint: "await Sandbox.create() makes one" });
    }
    this.client = client;
    this.id = id;
    this.files = new SandboxFiles(client, id);
    this.ownsClient = owns.client;
    this.isMade = owns.sandbox;
  }

  /** Makes a sandbox, of a template if one is named. `await using` destroys it at the end of the block. */
  static async create(templateOrOptions: string | SandboxOptions = {}, more: SandboxOptions = {}): Promise<Sandbox> {
    const options = typeof templateOrOptions === "string" ? { ...more, template: templateOrOptions } : templateOrOptions;
    checkOptions("a sandbox", options, SANDBOX_NAMES);
    const { client: given, image, runtime, endpoint, apiKey, profile, ...others } = options;
    if (image && others.template) {
      throw new InvalidRequest("a sandbox is made from a template or from an image, not from both", {
        hint: "name the image in the template",
      });
    }
    const { cpus, memory, pids, disk, inodes, openFiles, output, limits, ...session } = others;
    const client = given ?? new SandboxClient({ endpoint, apiKey, profile });
    try {
      const id = await client.createSession({
        ...session,
        runtimeClass: runtime,
        template: image ? await templateOf(client, image, session) : session.template,
        limits: { ...limits, ...said({ cpus, memory, pids, disk, inodes, openFiles, output }) },
      });
      return new Sandbox(client, id, { client: given === undefined, sandbox: true });
    } catch (error) {
      if (given === undefined) await client.close();
      throw error;
    }
  }

  /** An existing sandbox; it stays when this object is disposed of. */
  static async connect(id: string, options: ConnectOptions = {}): Promise<Sandbox> {
    const client = options.client ?? own(options);
    try {
      const { phase, endedReason } = await client.getSession(id, options);
      if (phase === "ended") {
        throw new SessionNotFound(`sandbox ${id} has ended: ${endedReason}`, { hint: "Sandbox.create() makes another one" });
      }
    } catch (error) {
      if (options.client === undefined) await client.close();
      throw error;
    }
    return new Sandbox(client, id, { client: options.client === undefined, sandbox: false });
  }

  /** Your sandboxes; with `ended` also those that ended within a day. */
  static async list(options: ConnectOptions & { ended?: boolean | undefined } = {}): Promise<SessionInfo[]> {
    const client = options.client ?? own(options);
    try {
      return await client.listSessions(options.tenantId, options);
    } finally {
      if (options.client === undefined) await client.close();
    }
  }

  /** Destroys it, if it was made by this object, and closes its connections. */
  async [Symbol.asyncDispose](): Promise<void> {
    if (this.isMade) await this.kill();
    else await this.close();
  }

  /** Destroys it and everything in it; nothing happens if it has ended. */
  async kill(options?: CallOptions): Promise<void> {
    try {
      await this.client.destroySession(this.id, options);
    } catch (error) {
      if (!(error instanceof SessionNotFound)) throw error;
    } finally {
      await this.close();
    }
  }

  /** Closes its connections; the sandbox lives on until its lifetime ends. */
  async close(): Promise<void> {
    if (this.ownsClient) await this.client.close();
  }

  /** Runs source code; never through a shell line. */
  run(code: string | Uint8Array, language: Language = "bash", options: TimeoutOr<ExecOptions> = {}): Promise<ExecResult> {
    return this.client.run(code, language, { ...optionsOf(options), sessionId: this.id });
  }

  /** Runs a command and collects its output; text is for the shell, a list for no shell. */
  exec(command: Command, options?: TimeoutOr<ExecOptions>): Promise<ExecResult> {
    return this.client.exec(this.id, command, options);
  }

  /** Runs a command while iterating over its output and, last, its exit; leaving the loop kills it. */
  execEvents(command: Command, options?: TimeoutOr<ExecOptions>): AsyncGenerator<ExecEvent, void, void> {
    return this.client.execEvents(this.id, command, options);
  }

  /** Runs a command while iterating over its standard output as text. */
  execStream(command: Command, options?: TimeoutOr<ExecOptions>): AsyncGenerator<string, void, void> {
    return this.client.execStream(this.id, command, options);
  }

  /** Starts a command, or source code in `language`, that runs on without us. */
  start(command: Command, options?: Parameters<SandboxClient["start"]>[2]): Promise<Run> {
    return this.client.start(this.id, command, options);
  }

  /** Starts a program to write to and read from while it runs. */
  open(command: Command, options?: Parameters<SandboxClient["open"]>[2]): Promise<Process> {
    return this.client.open(this.id, command, options);
  }

  /** Starts a program on a terminal: by default `bash`, or `sh` where there is none. */
  terminal(program?: Command, options?: Parameters<SandboxClient["terminal"]>[2]): Promise<Process> {
    return this.client.terminal(this.id, program, options);
  }

  /** The output of all its programs. */
  transcript(options?: OutputOptions): AsyncGenerator<ExecEvent, void, void> {
    return this.client.transcript(this.id, options);
  }

  /** Installs Python packages (`["requests>=2.28"]`); the next import finds them. */
  pipInstall(packages: readonly string[], options?: Parameters<SandboxClient["pipInstall"]>[2]): Promise<ExecResult> {
    return this.client.pipInstall(this.id, packages, options);
  }

  /** Makes a port reachable on a URL; `(await sandbox.expose(8000)).wait()` waits for the server. */
  expose(port: number, host?: string, options?: CallOptions): Promise<Exposed> {
    return this.client.expose(this.id, port, host, options);
  }

  /** Starts a program that keeps its variables between runs. */
  context(language: ContextLanguage = "python", options?: CreateContextOptions): Promise<Context> {
    return this.client.createContext(this.id, language, options);
  }

  /** Saves its /workspace, under a name. */
  snapshot(name: string, options?: SnapshotProgress & { replace?: boolean | undefined }): Promise<Snapshot> {
    return this.client.saveSnapshot(this.id, name, options);
  }

  /** Freezes everything in it, until it is resumed. */
  pause(options?: CallOptions): Promise<void> {
    return this.client.pauseSession(this.id, options);
  }

  /** Lets it go on where it stopped. */
  resume(options?: CallOptions): Promise<void> {
    return this.client.resumeSession(this.id, options);
  }

  /** Lets it live `lifetime` seconds from now. */
  extend(lifetime: number, options?: CallOptions): Promise<SessionInfo> {
    return this.client.extendSession(this.id, lifetime, options);
  }

  info(options?: CallOptions): Promise<SessionInfo> {
    return this.client.getSession(this.id, options);
  }

  /** What it may reach, and what it was refused. */
  egress(options?: CallOptions): Promise<Egress> {
    return this.client.egress(this.id, options);
  }

  /** Replaces what it may reach; returns the policy in effect. */
  updateAllowedHosts(hosts: readonly string[], options?: CallOptions): Promise<string[]> {
    return this.client.updateAllowedHosts(this.id, hosts, options);
  }
}

/** A client for one sandbox. */
function own({ endpoint, apiKey, profile, tenantId, requestTimeout }: ConnectOptions): SandboxClient {
  return new SandboxClient({ endpoint, apiKey, profile, tenantId, requestTimeout });
}

/** The options without undefined ones. */
function said(limits: Limits): Limits {
  return Object.fromEntries(Object.entries(limits).filter(([, value]) => value !== undefined));
}

/** The template for an image, made if there is none. */
async function templateOf(client: SandboxClient, image: string, options: CallOptions): Promise<string> {
  const name = `image-${createHash("sha256").update(image).digest("hex").slice(0, 16)}`;
  try {
    await client.getTemplate(name, options);
  } catch (error) {
    if (!(error instanceof TemplateNotFound)) throw error;
    await client.applyTemplate({ name, description: `made for the image ${image}`, rootfs: `image:${image}` }, options);
  }
  return name;
}
