/**
 * Copies of files and whole trees between this machine and a sandbox.
 *
 * Links below the top are copied as links, never followed. All data from a sandbox is hostile: a
 * copied tree stays below its target, files take the place of links instead of being written through them,
 * and links are made last, only if they cannot lead out.
 *
 * @module
 */

import { constants, createReadStream, type Stats } from "node:fs";
import { lstat, open, readdir, readlink, stat as statLocal } from "node:fs/promises";
import { posix } from "node:path";

import { type CallOptions, type Connections } from "./connections.ts";
import type { Progress } from "./content.ts";
import { FileError, GuestFailed, InvalidRequest } from "./errors.ts";
import { entry, fileCall, type FileEntry, list, readChunks, write } from "./files.ts";
import { checkName, type Parts, Target } from "./targets.ts";

const WORKSPACE = "/workspace";

/** A count of what was copied. */
export interface Copied {
  bytes: number;
  files: number;
  folders: number;
  links: number;
  /** What cannot be copied: FIFOs, sockets, devices, and links that lead out. */
  skipped: number;
  /** Files that could not be read, of which `onSkip` was told. */
  failed: number;
}

/** How a tree is copied. */
export interface CopyOptions extends CallOptions {
  /** Called with the number of bytes that were moved, and the total if it is known. */
  progress?: Progress | undefined;
  /**
   * Called with a path that cannot be copied, and why. Otherwise a file that cannot be read raises its error, and
   * what is no file, or a link that leads out, is a warning of the process.
   */
  onSkip?: ((path: string, why: string) => void) | undefined;
}

/** Counts copied files, and reports progress. */
class Tally {
  readonly copied: Copied = { bytes: 0, files: 0, folders: 0, links: 0, skipped: 0, failed: 0 };
  total: number | undefined;
  private readonly options: CopyOptions;

  constructor(options: CopyOptions) {
    this.options = options;
  }

  /** Progress of one file among others. */
  part(): Progress {
    const before = this.copied.bytes;
    return (done) => {
      this.copied.bytes = before + done;
      this.options.progress?.(this.copied.bytes, this.total);
    };
  }

  skip(path: string, why: string): void {
    this.copied.skipped += 1;
    if (this.options.onSkip !== undefined) this.options.onSkip(path, why);
    else process.emitWarning(`'${path}' is not copied: ${why}`, "K8eWarning");
  }

  /** Without a listener, that is the end of the copy. */
  fail(path: string, error: Error): void {
    this.copied.failed += 1;
    if (this.options.onSkip === undefined) throw error;
    this.options.onSkip(path, error.message);
  }
}

/** One tree that is copied to a session or from it. */
export class TreeCopy {
  private readonly connections: Connections;
  private readonly sessionId: string;
  private readonly options: CopyOptions;
  private readonly tally: Tally;

  constructor(connections: Connections, sessionId: string, options: CopyOptions) {
    this.connections = connections;
    this.sessionId = sessionId;
    this.options = options;
    this.tally = new Tally(options);
  }

  private ask(op: string, path: string, fields: Record<string, string | number | boolean> = {}): ReturnType<Connections["call"]> {
    return this.connections.call(fileCall(op, this.sessionId, path, fields), this.options);
  }

  private async stat(path: string, follow: boolean): Promise<FileEntry> {
    return entry(await this.ask("stat", path, { follow }));
  }

  // To the session.

  async upload(source: string, path: string): Promise<Copied> {
    const found = await statLocal(source);
    if (found.isDirectory()) {
      await this.sendTree(source, found, path);
    } else if (found.isFile()) {
      this.tally.total = found.size;
      await this.sendFile(source, found, path, true);
    } else {
      throw new InvalidRequest(`${source} is neither a file nor a folder`, { hint: "pass a stream instead of its name" });
    }
    return this.tally.copied;
  }

  /** A folder's content, then the permissions of folders: they may forbid writing. */
  private async sendTree(source: string, top: Stats, path: string): Promise<void> {
    const items = await below(source);
    this.tally.total = items.reduce((sum, item) => sum + (item.found.isFile() ? item.found.size : 0), 0);
    const folders: [string, Stats][] = (await this.isFolder(path)) ? [] : [[path, top]];
    await this.sendFolder(path);
    for (const { local, relative, found } of items) {
      const target = posix.join(path, relative);
      if (found.isDirectory()) {
        await this.sendFolder(target);
        folders.push([target, found]);
      } else if (found.isSymbolicLink()) {
        await this.ask("symlink", target, { target: await readlink(local) });
        this.tally.copied.links += 1;
      } else if (found.isFile()) {
        await this.sendFile(local, found, target, false);
      } else {
        this.tally.skip(local, "it is neither a file nor a folder nor a link");
      }
    }
    for (const [folder, found] of folders.reverse()) {
      try {
        await this.ask("chmod", folder, { mode: found.mode & 0o777 });
      } catch (error) {
        if (!(error instanceof FileError && ["EPERM", "EACCES"].includes(error.code))) throw error; // not ours
      }
    }
  }

  private async isFolder(path: string): Promise<boolean> {
    try {
      return (await this.stat(path, true)).type === "dir";
    } catch (error) {
      if (error instanceof FileError && ["ENOENT", "ENOTDIR"].includes(error.code)) return false;
      throw error;
    }
  }

  private async sendFolder(path: string): Promise<void> {
    await this.ask("mkdir", path, { exist_ok: true });
    this.tally.copied.folders += 1;
  }

  private async sendFile(local: string, found: Stats, path: string, mayBeLink: boolean): Promise<void> {
    const handle = await open(local, constants.O_RDONLY | (mayBeLink ? 0 : constants.O_NOFOLLOW));
    const file = createReadStream(local, { fd: handle, highWaterMark: 256 << 10 });
    try {
      const call = fileCall("write", this.sessionId, path, { mode: found.mode & 0o777 });
      const signal = this.connections.limits(this.options);
      await write(this.connections, call, file as AsyncIterable<Uint8Array>, { signal, progress: this.tally.part() });
    } finally {
      file.destroy();
    }
    this.tally.copied.files += 1;
  }

  // From the session.

  async download(path: string, target: string): Promise<Copied> {
    const top = wholePath(path);
    const found = await this.stat(top, true);
    if (found.type !== "dir" && found.type !== "file") {
      throw new InvalidRequest(`${path} is a ${found.type.slice(0, 20)}, which cannot be copied`, {
        hint: "copy files and folders",
      });
    }
    const place = await Target.open(target);
    try {
      if (found.type === "file") {
        this.tally.total = found.size;
        await this.fetchFile(place, [], { ...found, path: top });
      } else {
        const entries = await list(this.connections, this.sessionId, 0, { ...this.options, path: top, directories: true });
        this.tally.total = entries.reduce((sum, item) => sum + (item.type === "file" ? item.size : 0), 0);
        await this.fetchTree(place, top, entries, found.mode);
      }
    } finally {
      await place.close();
    }
    return this.tally.copied;
  }

  private async fetchTree(place: Target, top: string, entries: readonly FileEntry[], mode: number): Promise<void> {
    const links: [Parts, FileEntry][] = [];
    const folders: [Parts, number][] = (await this.fetchFolder(place, [])) ? [[[], mode]] : [];
    for (const item of entries) {
      const parts = relativeParts(top, item.path);
      if (item.type === "dir") {
        await this.fetchFolder(place, parts);
        folders.push([parts, item.mode]);
      } else if (item.type === "file") {
        await this.tryFile(place, parts, item);
      } else if (item.type === "link") {
        links.push([parts, item]);
      } else {
        this.tally.skip(item.path, `it is a ${item.type.slice(0, 20)}`);
      }
    }
    for (const [parts, item] of links) await this.fetchLink(place, parts, item);
    for (const [parts, folderMode] of folders.reverse()) await place.setMode(parts, folderMode);
  }

  private async fetchFolder(place: Target, parts: Parts): Promise<boolean> {
    const isNew = await place.makeFolder(parts);
    this.tally.copied.folders += 1;
    return isNew;
  }

  private async tryFile(place: Target, parts: Parts, item: FileEntry): Promise<void> {
    try {
      await this.fetchFile(place, parts, item);
    } catch (error) {
      if (!(error instanceof FileError && ["ENOENT", "EACCES", "EPERM"].includes(error.code))) throw error;
      this.tally.fail(item.path, error);
    }
  }

  private async fetchFile(place: Target, parts: Parts, item: FileEntry): Promise<void> {
    const call = fileCall("read", this.sessionId, item.path);
    const signal = this.connections.limits(this.options);
    await place.makeFile(parts, item.mode, async (writePiece) => {
      const chunks = readChunks(this.connections, call, { signal, progress: this.tally.part() });
      for await (const chunk of chunks) await writePiece(chunk);
    });
    this.tally.copied.files += 1;
  }

  private async fetchLink(place: Target, parts: Parts, item: FileEntry): Promise<void> {
    try {
      const { target } = await this.stat(item.path, false);
      if (!staysInside(parts, target)) {
        this.tally.skip(item.path, "the link leads out of what is copied");
        return;
      }
      await place.makeLink(parts, target);
    } catch (error) {
      if (!(error instanceof Error && "code" in error)) throw error;
      this.tally.fail(item.path, error);
      return;
    }
    this.tally.copied.links += 1;
  }
}

interface Item {
  readonly local: string;
  readonly relative: string;
  readonly found: Stats;
}

/** Everything below a folder; a folder comes before its content. */
async function below(top: string): Promise<Item[]> {
  const items: Item[] = [];
  const folders = [""];
  for (let above = folders.pop(); above !== undefined; above = folders.pop()) {
    for (const name of (await readdir(posix.join(top, above))).sort()) {
      const relative = posix.join(above, name);
      const local = posix.join(top, relative);
      const found = await lstat(local);
      items.push({ local, relative, found });
      if (found.isDirectory()) folders.push(relative);
    }
  }
  return items;
}

/** A path in the form in which a sandbox lists entries below it; `PATH/.` is the same as `PATH`. */
function wholePath(path: string): string {
  const whole = path.startsWith("/") ? path : `${WORKSPACE}/${path}`;
  return whole.replace(/\/\.$/, "").replace(/\/+$/, "") || "/";
}

/** Where an entry belongs below the target. */
export function relativeParts(top: string, path: string): Parts {
  const start = `${top.replace(/\/+$/, "")}/`;
  if (!path.startsWith(start)) throw new GuestFailed(`the sandbox lists '${path.slice(0, 80)}', which was not asked for`);
  return path.slice(start.length).split("/").map(checkName);
}

/**
 * Whether a link can lead only to a place in the tree. `..` may come first, as often as there are folders
 * above; later it could climb out of wherever another link has led.
 */
export function staysInside(parts: Parts, target: string): boolean {
  const steps = target.split("/");
  let ups = 0;
  while (steps[ups] === ".." || steps[ups] === ".") ups += 1;
  const climbed = steps.slice(0, ups).filter((step) => step === "..").length;
  return (
    target !== "" &&
    !target.startsWith("/") &&
    !target.includes("\0") &&
    climbed < parts.length &&
    !steps.slice(ups).includes("..")
  );
}
