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
	switch value := os.Getenv(Variable); value {
	case "all":
		for at := 1; at <= calls; at++ {
			list = append(list, at)
		}
	case "":
		from := rand.N(calls)
		for i := range sample {
			list = append(list, 1+(from+i*calls/sample)%calls)
		}
	default:
		first, of, isPart := strings.Cut(value, "/")
		at, err := strconv.Atoi(first)
		step := calls
		if isPart && err == nil {
			step, err = strconv.Atoi(of)
		}
		if err != nil || at < 1 || step < 1 || isPart && at > step {
			return nil, fmt.Errorf("%s=%q: want all, a number from 1, or a part such as 3/8", Variable, value)
		}
		list = append(list, at)
		for at += step; isPart && at <= calls; at += step {
			list = append(list, at)
		}
	}
	return list, nil
}
