/** `wasm/xxh3.ts`, compiled, in base64. The build makes this module. */
export declare const XXH3: string;
