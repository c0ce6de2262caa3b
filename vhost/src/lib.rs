//! vhost
