/** The version of this package, which is that of k8e. */
export const version = "0.1.0";
