package fault

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
)

// Variable says at which calls of a program a sweep has a fault: "all", "17" for the 17th
// alone, or "3/8" for the third of eight parts, which together are all. Unset, it is a
// sample.
const Variable = "TOMBOLO_SWEEP"

// Points are the calls of so many at which a sweep has a fault: see Variable. Those of a
// part and of a sample are evenly spread, and a sample is another one in each run.
func Points(calls, sample int) ([]int, error) {
	var list []int
	if os.Getenv(Variable) == "" {
		from := rand.N(calls)
		for i := range sample {
			list = append(list, 1+(from+i*calls/sample)%calls)
		}
		return list, nil
	}
	at, step, err := Strides(1)
	for more := err == nil; more; more = at <= calls && step > 0 {
		list = append(list, at)
		at += step
	}
	return list, err
}

// Strides says at which calls a sweep has faults, where it learns the number of calls only at their end: the
// first such call, and how many calls further on the next one is (0: there is only one). By default it is one
// call in sample, beginning at a random one.
func Strides(sample int) (first, step int, err error) {
	value := os.Getenv(Variable)
	switch value {
	case "all":
		return 1, 1, nil
	case "":
		return 1 + rand.N(sample), sample, nil
	}
	at, of, isPart := strings.Cut(value, "/")
	if first, err = strconv.Atoi(at); isPart && err == nil {
		step, err = strconv.Atoi(of)
	}
	if err != nil || first < 1 || isPart && first > step {
		return 0, 0, fmt.Errorf("%s=%q: want all, a number from 1, or a part such as 3/8", Variable, value)
	}
	return first, step, nil
}
