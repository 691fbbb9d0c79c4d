/**
 * The local target of a copied tree. Folders are entered step by step and never through a link, and on
 * Linux held open meanwhile, so that no other program can lead us elsewhere.
 *
 * @module
 */

import { randomBytes } from "node:crypto";
import { constants, readFileSync } from "node:fs";
import { type FileHandle, lstat, mkdir, open, realpath, rename, symlink, unlink } from "node:fs/promises";
import { basename, dirname, join } from "node:path";

import { GuestFailed, InvalidRequest } from "./errors.ts";

const { O_DIRECTORY, O_EXCL, O_CREAT, O_NOFOLLOW, O_RDONLY, O_WRONLY } = constants;
const IS_LINUX = process.platform === "linux";
const NAME_BYTES = 255;

/** Names of folders, and last a name in them. */
export type Parts = readonly string[];

/** The name, if it can only be an entry of its folder. */
export function checkName(name: string): string {
  if (name === "" || name === "." || name === ".." || /[/\0]/.test(name) || (!IS_LINUX && name.includes("\\"))) {
    throw new GuestFailed(`the sandbox names a file '${name.slice(0, 80)}'`);
  }
  if (Buffer.byteLength(name) > NAME_BYTES) throw new GuestFailed("the sandbox names a file with too long a name");
  return name;
}

/** A folder that is held open. */
class Folder {
  private readonly handle: FileHandle | undefined;
  private readonly path: string;

  private constructor(path: string, handle: FileHandle | undefined) {
    this.path = path;
    this.handle = handle;
  }

  static async open(path: string, flags = 0): Promise<Folder> {
    if (IS_LINUX) return new Folder(path, await open(path, O_RDONLY | O_DIRECTORY | flags));
    const found = await lstat(path);
    if (flags !== 0 && !found.isDirectory()) throw Object.assign(new Error("not a folder"), { code: "ENOTDIR" });
    return new Folder(path, undefined);
  }

  /** The path of an entry in it. */
  at(name: string): string {
    return this.handle === undefined ? join(this.path, name) : `/proc/self/fd/${this.handle.fd}/${name}`;
  }

  enter(name: string): Promise<Folder> {
    return Folder.open(this.at(name), O_NOFOLLOW);
  }

  async chmod(mode: number): Promise<void> {
    await this.handle?.chmod(mode);
  }

  async close(): Promise<void> {
    await this.handle?.close();
  }
}

/** The target of a copy. Its parent folder must exist, and may be reached through links. */
export class Target {
  private readonly top: Folder;
  private readonly under: Parts;
  private readonly mask = umask();

  private constructor(top: Folder, under: Parts) {
    this.top = top;
    this.under = under;
  }

  static async open(path: string): Promise<Target> {
    const plain = /(^|\/)\.{0,2}$/.test(path) ? await realpath(path) : path;
    const name = basename(plain);
    return new Target(await Folder.open(dirname(plain)), name === "" ? [] : [name]);
  }

  async close(): Promise<void> {
    await this.top.close();
  }

  /** Works in a folder of the tree. */
  private async within<T>(parts: Parts, work: (folder: Folder) => Promise<T>): Promise<T> {
    let folder = this.top;
    try {
      for (const part of parts) {
        let inner: Folder;
        try {
          inner = await folder.enter(part);
        } catch (error) {
          throw new InvalidRequest(
            `'${parts.join("/").slice(0, 400)}' cannot be entered below the target: ${(error as Error).message}`,
            { cause: error, hint: "copy to a folder without links or files of these names" },
          );
        }
        if (folder !== this.top) await folder.close();
        folder = inner;
      }
      return await work(folder);
    } finally {
      if (folder !== this.top) await folder.close();
    }
  }

  /** Makes a folder, unless it exists; returns whether it was made. */
  async makeFolder(parts: Parts): Promise<boolean> {
    const whole = [...this.under, ...parts];
    const name = whole.at(-1);
    let isNew = false;
    if (name !== undefined) {
      await this.within(whole.slice(0, -1), async (folder) => {
        try {
          await mkdir(folder.at(name), 0o700);
          isNew = true;
        } catch (error) {
          if ((error as NodeJS.ErrnoException).code !== "EEXIST") throw error;
        }
      });
    }
    return this.within(whole, () => Promise.resolve(isNew));
  }

  setMode(parts: Parts, mode: number): Promise<void> {
    return this.within([...this.under, ...parts], (folder) => folder.chmod(((mode & 0o777) | 0o700) & ~this.mask));
  }

  /** Makes a file in place of an existing entry; it appears whole or not at all. */
  async makeFile(parts: Parts, mode: number, fill: (write: (data: Uint8Array) => Promise<void>) => Promise<void>): Promise<void> {
    const whole = [...this.under, ...parts];
    const name = whole.at(-1);
    if (name === undefined) throw new InvalidRequest("the target is a folder", { hint: "name a file in it" });
    await this.within(whole.slice(0, -1), async (folder) => {
      const scratch = folder.at(scratchName());
      const file = await open(scratch, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0o600);
      try {
        await fill(async (data) => {
          for (let at = 0; at < data.length; ) at += (await file.write(data, at)).bytesWritten;
        });
        await file.chmod(mode & 0o777 & ~this.mask);
        await file.close();
        await rename(scratch, folder.at(name));
      } catch (error) {
        await file.close().catch(() => undefined);
        await unlink(scratch).catch(() => undefined);
        throw error;
      }
    });
  }

  /** Makes a link in place of a file or link of that name. */
  async makeLink(parts: Parts, pointsTo: string): Promise<void> {
    const whole = [...this.under, ...parts];
    const name = whole.at(-1) ?? "";
    await this.within(whole.slice(0, -1), async (folder) => {
      const scratch = folder.at(scratchName());
      await symlink(pointsTo, scratch);
      try {
        await rename(scratch, folder.at(name));
      } catch (error) {
        await unlink(scratch);
        throw error;
      }
    });
  }
}

/** The umask; only Linux shows it without changing it for every thread. */
function umask(): number {
  if (!IS_LINUX) return 0o022;
  const found = /^Umask:\s*([0-7]+)$/m.exec(readFileSync("/proc/self/status", "utf8"));
  return Number.parseInt(found?.[1] ?? "022", 8);
}

function scratchName(): string {
  return `.k8e-${randomBytes(8).toString("hex")}`;
}
