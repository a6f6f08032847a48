// What both searches of weight scales share: round_to_nearest.cpp and weighted_search.cpp.
#pragma once

namespace lowbit {

// A group whose scale would be smaller counts as constant: the inverse of the scale must be finite.
constexpr float kSmallestScale = 0x1p-120f;

// x + kRoundShift - kRoundShift is x rounded to an integer, ties to even, for x below 2^22: the sum has no room for a fraction.
constexpr float kRoundShift = 0x1.8p23f;

}  // namespace lowbit
