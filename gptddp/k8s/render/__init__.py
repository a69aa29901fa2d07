"""Renders a job's specification as Kubernetes objects, in pure functions."""
