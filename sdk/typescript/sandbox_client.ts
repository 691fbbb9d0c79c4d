/**
 * K8E's name and place of the TypeScript SDK, which is the package `k8e`.
 *
 * @module
 */

export * from "./src/index.ts";
