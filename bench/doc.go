// Package bench has benchmarks only: of what one pod costs, in the plugin as it is
// executed and in this process, and beside others. README.md says which there are, and how
// to read them.
package bench
