/** A tool for the AI SDK: the model writes Python, a sandbox runs it. */

import { generateText, stepCountIs, tool } from "ai";
import { Sandbox } from "k8e";
import { z } from "zod";

import { scriptedModel } from "./scripted-model.ts";

const sandbox = await Sandbox.create({ memory: "1G", allowedHosts: [] });
const runPython = tool({
  description: "Runs Python code in a sandbox; what it printed",
  inputSchema: z.object({ code: z.string() }),
  execute: async ({ code }, { abortSignal }) => (await sandbox.run(code, "python", { signal: abortSignal })).toJSON(),
});
const model = scriptedModel("runPython", { code: "print(6 * 7)" }, "It is 42.");
const done = await generateText({ model, tools: { runPython }, stopWhen: stepCountIs(5), prompt: "What is 6 * 7?" });
console.log(done.steps[0]?.toolResults[0]?.output, done.text);
await sandbox.kill();
