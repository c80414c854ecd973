mod model;
mod split;
