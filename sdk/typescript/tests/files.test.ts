import { chmodSync, mkdirSync, mkdtempSync, readFileSync, readlinkSync, rmSync, statSync, symlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

import { afterAll, beforeAll, describe, expect, it } from "vitest";

import { errors } from "../src/index.ts";
import { relativeParts, staysInside } from "../src/trees.ts";
import { checkName } from "../src/targets.ts";
import { all, failure, onEachRuntime } from "./gateway.ts";

onEachRuntime("files", (shared, runtime) => {
  let local: string;
  beforeAll(() => {
    local = mkdtempSync(join(tmpdir(), "k8e-typescript-"));
  });
  afterAll(() => {
    rmSync(local, { recursive: true });
  });

  it.each([
    ["text", "häl€o", Buffer.from("häl€o")],
    ["bytes", Uint8Array.of(0, 255, 10), Buffer.of(0, 255, 10)],
    ["an array buffer", Uint8Array.of(1, 2).buffer, Buffer.of(1, 2)],
    ["a blob", new Blob(["blob"]), Buffer.from("blob")],
    ["nothing", "", Buffer.of()],
    ["an iterable of text and bytes", ["a", Uint8Array.of(98)], Buffer.from("ab")],
  ])("any content can be written: %s", async (name, content, written) => {
    const { client, sessionId } = shared;
    expect(await client.writeFile(sessionId, `written/${name}`, content)).toBe(written.length);
    expect(Buffer.compare(await client.readBytes(sessionId, `written/${name}`), written)).toBe(0);
  });

  it("a web stream can be written, and a file read as one", async () => {
    const { client, sessionId } = shared;
    const content = Buffer.alloc(2_500_000, "stream");
    await client.writeFile(sessionId, "streamed", new Blob([content]).stream());
    const back = await new Response(client.readStream(sessionId, "streamed")).arrayBuffer();
    expect(Buffer.compare(Buffer.from(back), content)).toBe(0);
  });

  it("a stream that nobody reads to its end holds nothing", async () => {
    const { client, sessionId } = shared;
    await client.writeFile(sessionId, "long", Buffer.alloc(5 << 20));
    const reader = client.readStream(sessionId, "long").getReader();
    await reader.read();
    await reader.cancel();
    expect((await client.stat(sessionId, "long")).size).toBe(5 << 20);
  });

  it("a file can be appended to and read in part", async () => {
    const { client, sessionId } = shared;
    await client.writeFile(sessionId, "parts", "abc", { mode: 0o600 });
    await client.writeFile(sessionId, "parts", "def", { append: true });
    expect(await client.readFile(sessionId, "parts", { offset: 2, length: 2 })).toBe("cd");
    expect((await client.stat(sessionId, "parts")).mode).toBe(0o600);
  });

  it("a large file comes back as it was written, however it arrives", async () => {
    const { client, sessionId } = shared;
    const content = Buffer.alloc(7_654_321);
    for (let at = 0; at + 4 <= content.length; at += 4) content.writeUInt32BE(at, at);
    await client.writeFile(sessionId, "pattern", content);
    for (const offset of [0, 1, 300_000]) {
      const found = await client.readBytes(sessionId, "pattern", { offset });
      expect(Buffer.compare(found, content.subarray(offset))).toBe(0);
    }
    await client.start(sessionId, "head -c 3000000 /dev/zero >> pattern", 30);
    const grown = Buffer.from(await client.readBytes(sessionId, "pattern"));
    expect(Buffer.compare(grown.subarray(0, content.length), content)).toBe(0);
  });

  it("progress tells how far it is", async () => {
    const { client, sessionId } = shared;
    const told: [number, number | undefined][] = [];
    const progress = (done: number, total: number | undefined): void => void told.push([done, total]);
    await client.writeFile(sessionId, "counted", Buffer.alloc(600_000), { progress });
    expect(told.at(-1)).toEqual([600_000, 600_000]);
    told.length = 0;
    expect((await all(client.readChunks(sessionId, "counted", { progress }))).length).toBeGreaterThan(1);
    expect(told.at(-1)).toEqual([600_000, 600_000]);
  });

  it("files are described, listed, renamed and removed", async () => {
    const { client, sessionId } = shared;
    await client.writeFile(sessionId, "home/a.txt", "abc");
    await client.symlink(sessionId, "home/link", "a.txt");
    const entry = await client.stat(sessionId, "home/a.txt");
    expect(entry).toMatchObject({ path: "/workspace/home/a.txt", type: "file", size: 3 });
    expect(Math.abs(entry.modified - Date.now() / 1000)).toBeLessThan(3600);
    expect(await client.stat(sessionId, "home/link")).toMatchObject({ type: "link", target: "a.txt" });
    expect((await client.stat(sessionId, "home/link", { follow: true })).type).toBe("file");
    await client.chmod(sessionId, "home/a.txt", 0o700);
    await client.rename(sessionId, "home/a.txt", "home/deep/b.txt");
    const listed = await client.listFiles(sessionId, 0, { path: "home", directories: true });
    expect(listed.map((item) => item.path).sort()).toEqual([
      "/workspace/home/deep",
      "/workspace/home/deep/b.txt",
      "/workspace/home/link",
    ]);
    expect(await client.listFiles(sessionId, Date.now() / 1000 + 3600)).toEqual([]);
    await client.remove(sessionId, "home", { recursive: true });
    expect(await client.listFiles(sessionId, 0, { path: "/workspace" })).not.toContainEqual(
      expect.objectContaining({ path: "/workspace/home/deep/b.txt" }),
    );
  });

  it("a name that is no UTF-8 comes back as it was listed", async () => {
    const { client, sessionId } = shared;
    await client.exec(sessionId, String.raw`mkdir odd; printf odd > "odd/$(printf '\377\303')"`);
    const [found] = await client.listFiles(sessionId, 0, { path: "odd" });
    expect(found?.path).toBe("/workspace/odd/\udcff\udcc3");
    expect(await client.readFile(sessionId, found?.path ?? "")).toBe("odd");
  });

  it("errors of files have the names of error numbers, and a hint", async () => {
    const { client, sessionId } = shared;
    const error = await failure(client.readFile(sessionId, "missing"));
    expect(error).toBeInstanceOf(errors.FileError);
    expect(error).toMatchObject({ code: "ENOENT" });
    expect((error as errors.FileError).hint).toContain("sandbox");
    expect(await failure(client.writeFile(sessionId, "/etc/shadow", "x"))).toMatchObject({ name: "FileError" });
    await client.mkdir(sessionId, "folder");
    expect(await failure(client.mkdir(sessionId, "folder", { existOk: false }))).toMatchObject({ code: "EEXIST" });
  });

  it("a source that fails leaves no file", async () => {
    const { client, sessionId } = shared;
    const broken = async function* (): AsyncGenerator<Uint8Array> {
      yield Buffer.alloc(1000);
      await Promise.resolve();
      throw new RangeError("the source broke");
    };
    expect(await failure(client.writeFile(sessionId, "half", broken()))).toBeInstanceOf(RangeError);
    expect(await failure(client.stat(sessionId, "half"))).toMatchObject({ code: "ENOENT" });
  });

  it("an aborted upload leaves no file", async () => {
    const { client, sessionId } = shared;
    const controller = new AbortController();
    const endless = async function* (): AsyncGenerator<Uint8Array> {
      for (let count = 0; ; count += 1) {
        if (count === 10) controller.abort();
        await Promise.resolve();
        yield Buffer.alloc(1000);
      }
    };
    const error = await failure(client.writeFile(sessionId, "endless", endless(), { signal: controller.signal }));
    expect(error).toBeInstanceOf(errors.Aborted);
    expect(await failure(client.stat(sessionId, "endless"))).toMatchObject({ code: "ENOENT" });
  });

  it("a tree is copied there and back, with modes and links", async () => {
    const { client, sessionId } = shared;
    const source = join(local, "source");
    mkdirSync(join(source, "inner/empty"), { recursive: true });
    writeFileSync(join(source, "a.txt"), "a");
    writeFileSync(join(source, "inner/run.sh"), "#!/bin/sh\necho ran\n");
    chmodSync(join(source, "inner/run.sh"), 0o755);
    symlinkSync("../a.txt", join(source, "inner/link"));
    expect(await client.upload(sessionId, source, "tree")).toMatchObject({ files: 2, folders: 3, links: 1, skipped: 0 });
    expect((await client.exec(sessionId, "tree/inner/run.sh; cat tree/inner/link")).stdout).toBe("ran\na");
    const back = join(local, "back");
    expect(await client.download(sessionId, "tree", back)).toMatchObject({ files: 2, folders: 3, links: 1 });
    expect(readFileSync(join(back, "a.txt"), "utf8")).toBe("a");
    expect(readlinkSync(join(back, "inner/link"))).toBe("../a.txt");
    expect(statSync(join(back, "inner/run.sh")).mode & 0o111).not.toBe(0);
    const single = join(local, "single");
    expect(await client.download(sessionId, "tree/a.txt", single)).toMatchObject({ files: 1, bytes: 1 });
    expect(readFileSync(single, "utf8")).toBe("a");
  });

  it("nothing that a sandbox says leads out of a download", async () => {
    const { client, sessionId } = shared;
    await client.exec(sessionId, "mkdir -p trap/in; ln -s /etc trap/out; ln -s ../../x trap/in/up; mkfifo trap/pipe; echo f > trap/f");
    const skipped: string[] = [];
    const target = join(local, "trap");
    mkdirSync(target);
    writeFileSync(join(local, "victim"), "untouched");
    symlinkSync("../victim", join(target, "f"));
    const copied = await client.download(sessionId, "trap", target, { onSkip: (path) => skipped.push(path) });
    expect(copied).toMatchObject({ files: 1, skipped: 3, links: 0 });
    expect(skipped.sort()).toEqual(["/workspace/trap/in/up", "/workspace/trap/out", "/workspace/trap/pipe"]);
    expect(readFileSync(join(local, "victim"), "utf8")).toBe("untouched");
    expect(readFileSync(join(target, "f"), "utf8")).toBe("f\n");
    symlinkSync("/etc", join(local, "elsewhere"));
    rmSync(join(target, "in"), { recursive: true });
    symlinkSync(local, join(target, "in"));
    const error = await failure(client.download(sessionId, "trap", target, { onSkip: () => undefined }));
    expect(error).toBeInstanceOf(errors.InvalidRequest);
  });

  it(`a package that is none is refused before anything runs (${runtime})`, async () => {
    const { client, sessionId } = shared;
    expect(await failure(client.pipInstall(sessionId, ["--index-url=x"]))).toBeInstanceOf(errors.InvalidRequest);
    expect(await failure(client.pipInstall(sessionId, "requests" as never))).toBeInstanceOf(errors.InvalidRequest);
  });
});

describe("what a hostile sandbox says of a tree", () => {
  it.each(["", ".", "..", "a/b", "a\0b", "x".repeat(256)])("the name %j is refused", (name) => {
    expect(() => checkName(name)).toThrow(errors.GuestFailed);
  });

  it("an entry that was not asked for is refused", () => {
    expect(() => relativeParts("/workspace/a", "/etc/passwd")).toThrow(errors.GuestFailed);
    expect(() => relativeParts("/workspace/a", "/workspace/a/../b")).toThrow(errors.GuestFailed);
    expect(relativeParts("/workspace/a", "/workspace/a/b/c")).toEqual(["b", "c"]);
  });

  it.each([
    [["l"], "a", true],
    [["d", "l"], "../a", true],
    [["l"], "../a", false],
    [["d", "l"], "x/../../a", false],
    [["l"], "/etc", false],
    [["l"], "", false],
    [["l"], "a\0", false],
  ])("a link at %j to %j stays inside: %s", (parts, target, stays) => {
    expect(staysInside(parts, target)).toBe(stays);
  });
});
