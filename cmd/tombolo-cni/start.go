package main

import "runtime"

// prepare spares a process that lives for some milliseconds what Go's runtime does for
// those that live long: samples of what is allocated, and a stack that doubles again and
// again, each time with more frames to copy. Together that is a twentieth of a call.
func prepare() {
	runtime.MemProfileRate = 0
	growStack(false)
}

// stackSize is what the deepest calls need.
const stackSize = 24 << 10

// growStack has room for as much, and so the stack has after it.
//
//go:noinline
func growStack(use bool) byte {
	if !use {
		return 0
	}
	var room [stackSize]byte
	return occupy(&room)
}

// occupy keeps the compiler from doing without the room.
//
//go:noinline
func occupy(room *[stackSize]byte) byte {
	for i := range room {
		room[i] = byte(i)
	}
	return room[stackSize/2]
}
