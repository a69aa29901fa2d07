//go:build tools

// Package tools names the commands that `go build` makes from the pinned module.
package tools

import _ "github.com/prometheus/prometheus/cmd/prometheus"
