//go:build tools

// Package tools names the command that `go build` makes from the pinned module.
package tools

import _ "go.etcd.io/etcd/server/v3"
