import { execFileSync } from "node:child_process";

import { describe, expect, it } from "vitest";

import { errors } from "../src/index.ts";
import { camelCase, fill, wireName } from "../src/records.ts";
import { parseLimit } from "../src/sessions.ts";
import * as wire from "../src/wire.ts";
import { python } from "./gateway.ts";

const VALUES: wire.Packable[] = [
  null,
  true,
  false,
  0,
  -1,
  2 ** 31,
  -(2 ** 40) - 5,
  2n ** 62n,
  -(2n ** 63n),
  1.5,
  -1e300,
  "",
  "häl€o 🙂",
  "odd \udcff\udc80 name",
  Buffer.of(0, 255),
  [],
  [1, ["a", [null]]],
  { a: 1, b: { c: [true] }, "ключ": "x" },
  "long".repeat(50_000),
];

describe("packed values", () => {
  it("come back as they were", () => {
    for (const value of VALUES) expect(wire.unpack(wire.pack(value))).toEqual(value);
    expect(wire.unpack(wire.pack({ a: undefined, b: 1 }))).toEqual({ b: 1 });
  });

  it("are, byte for byte, those of the gateway", () => {
    const packed = VALUES.map((value) => wire.pack(value).toString("hex"));
    const code =
      "import json, sys; from k8e.guest import wire\n" +
      "print(json.dumps([wire.pack(wire.unpack(bytes.fromhex(item))).hex() for item in json.load(sys.stdin)]))";
    const again = execFileSync(python, ["-c", code], { input: JSON.stringify(packed), encoding: "utf8", maxBuffer: 1 << 26 });
    expect(JSON.parse(again)).toEqual(packed);
  });

  it.each([
    ["nothing", ""],
    ["an unknown tag", "7a"],
    ["a number that is cut off", "690000"],
    ["a length beyond the data", "73ffffffff61"],
    ["bytes after the value", "4e4e"],
    ["too deep", "6c00000001".repeat(9) + "4e"],
    ["a key that is no text", "64000000014e4e"],
    ["more values than are there", "6cffffffff"],
  ])("that are not of this protocol are refused: %s", (_, hex) => {
    expect(() => wire.unpack(Buffer.from(hex, "hex"))).toThrow(wire.WireError);
  });

  it("with the key __proto__ change nothing", () => {
    const packed = wire.pack(JSON.parse('{"__proto__": {"polluted": true}}') as wire.Packable);
    const told = wire.unpackDict(packed);
    expect(Object.keys(told)).toEqual(["__proto__"]);
    expect(({} as Record<string, unknown>).polluted).toBeUndefined();
  });

  it("that nothing can be are errors", () => {
    expect(() => wire.pack(2n ** 64n)).toThrow(RangeError);
    expect(() => wire.pack((() => 1) as never)).toThrow(TypeError);
  });
});

describe("frames", () => {
  it("are cut out of a stream, however it is torn", () => {
    const bodies = [Buffer.of(), Buffer.from("a"), Buffer.alloc(300_000, 7)];
    const stream = Buffer.concat(bodies.flatMap((body, at) => [wire.header(body.length, 6, at), body]));
    for (const step of [1, 8, 9, 10, 65_536, stream.length]) {
      const found: [number, number, Buffer][] = [];
      const splitter = new wire.Splitter(1 << 20, (kind, channel, body) => void found.push([kind, channel, body]));
      const torn = step === 1 ? stream.subarray(0, 100) : stream;
      for (let at = 0; at < torn.length; at += step) splitter.feed(Buffer.from(torn.subarray(at, at + step)));
      if (step > 1) expect(found.map(([kind, channel, body]) => [kind, channel, body.length])).toEqual([[6, 0, 0], [6, 1, 1], [6, 2, 300_000]]);
      else expect(found.length).toBe(2);
    }
  });

  it("that are too large are refused", () => {
    const splitter = new wire.Splitter(10, () => undefined);
    expect(() => {
      splitter.feed(wire.header(11, 6, 1));
    }).toThrow(wire.WireError);
  });
});

describe("records", () => {
  it("have the names of TypeScript and the types that are promised", () => {
    expect(wireName("backgroundRuns")).toBe("background_runs");
    expect(camelCase("ca_fingerprint")).toBe("caFingerprint");
    const shape = { someText: "", aNumber: 0, list: [] as string[], map: {} as Record<string, number>, flag: false };
    const told = { some_text: 5, a_number: 2n ** 60n, list: ["a"], map: { under_score: 1 }, flag: true, more: 1 };
    expect(fill(shape, told)).toEqual({ someText: "", aNumber: 2 ** 60, list: ["a"], map: { under_score: 1 }, flag: true });
  });

  it.each([
    ["512M", 512 * 2 ** 20],
    ["1.5GiB", 1.5 * 2 ** 30],
    ["100", 100],
    ["2kb", 2048],
  ])("the size %s is %d", (text, size) => {
    expect(parseLimit("memory", text)).toBe(size);
  });

  it.each(["", "M", "1.2.3", "5X", "-1"])("the size %j is refused", (text) => {
    expect(() => parseLimit("memory", text)).toThrow(errors.InvalidRequest);
  });
});
