// The steps after the sort: the extent of the inputs decides whether hot.h or general.h computes the results.
#pragma once

#include "general.h"
#include "hot.h"

namespace raoe {

// Not inlined, and with arguments by value: references would keep the caller's variables in memory.
template <class Tiles>
__device__ __noinline__ void solve_generally(Tiles tiles, typename Tiles::Pairs my) {
  General<Tiles>{tiles, my}.run();
}

// resident: whether each block has at most one tile. room: see linear_room in formulas.h.
template <class Tiles>
__device__ __forceinline__ void solve(const Tiles& tiles, typename Tiles::Pairs& my, bool resident, float room) {
  const PairwiseArgs& args = tiles.args;
  const auto& extent = tiles.extent;
  if (extent.nan) return tiles.write_nan();
  if constexpr (sizeof(typename Tiles::T) == 4) {
    const float tau = static_cast<float>(args.tau);
    const bool linear = tau < 1e9f && (!args.rank || tau * (extent.high - extent.low) < room) &&
                        (!args.angle || tau * (angle(extent.low) - angle(extent.high)) < room);
    const bool columns = !args.angle || (args.labels && tiles.label_range() < COLUMN_LABELS);
    if (linear && columns && resident && args.ties == Ties::average) {
      if (args.rank && args.angle) return Hot<RANK | ANGLE, Tiles>{tiles, my}.run();
      return args.rank ? Hot<RANK, Tiles>{tiles, my}.run() : Hot<ANGLE, Tiles>{tiles, my}.run();
    }
  }
  solve_generally(tiles, my);
}

}  // namespace raoe
