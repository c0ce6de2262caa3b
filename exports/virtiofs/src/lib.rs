//! virtiofs
