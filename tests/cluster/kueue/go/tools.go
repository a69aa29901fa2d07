//go:build tools

// Package kueue pins the version of Kueue whose controller `build` builds.
package kueue

import (
	_ "sigs.k8s.io/kueue/cmd/kueue"
)
