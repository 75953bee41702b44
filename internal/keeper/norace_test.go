//go:build !race

package keeper

// underRace says that the race detector is at work, which takes memory of its own.
const underRace = false
