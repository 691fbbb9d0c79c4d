/** A language model that says what it was told to, so that the example needs no other. */

import type { LanguageModel } from "ai";
import { MockLanguageModelV3 } from "ai/test";

/** Calls `tool` with `input` first, and then says `text`. */
export function scriptedModel(tool: string, input: Record<string, unknown>, text: string): LanguageModel {
  const usage = {
    inputTokens: { total: 1, noCache: 1, cacheRead: 0, cacheWrite: 0 },
    outputTokens: { total: 1, text: 1, reasoning: 0 },
  };
  const call = { type: "tool-call", toolCallId: "1", toolName: tool, input: JSON.stringify(input) } as const;
  const answers = [
    { content: [call], finishReason: { unified: "tool-calls", raw: undefined }, usage, warnings: [] } as const,
    { content: [{ type: "text", text }], finishReason: { unified: "stop", raw: undefined }, usage, warnings: [] } as const,
  ];
  let asked = 0;
  return new MockLanguageModelV3({
    doGenerate: () => Promise.resolve(structuredClone(answers[Math.min(asked++, 1)]!) as never),
  });
}
