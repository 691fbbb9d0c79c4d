// Package tests needs what Kubernetes' end-to-end tests need, so that go.sum has the checksums of all that.
package tests

import _ "k8s.io/kubernetes/test/e2e"
