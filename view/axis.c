#include "view/axis.h"

#include <math.h>

bool axis_shows(const axis *along, double value)
{
    return isfinite(value) && (!along->logarithmic || value > 0);
}

double axis_at(const axis *along, double value)
{
    const double share = along->logarithmic ? log(value / along->least) / log(along->most / along->least)
                                            : (value - along->least) / (along->most - along->least);
    return along->begin + share * (along->end - along->begin);
}

void axis_include(axis *along, double value)
{
    if (!axis_shows(along, value))
        return;
    along->least = fmin(along->least, value);
    along->most = fmax(along->most, value);
}

bool axis_is_empty(const axis *along)
{
    return !(along->least <= along->most);
}
