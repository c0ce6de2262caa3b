//! The images, and the forms in which a registry has them.

/// An image, and what is started of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Image {
    /// A small distribution, which all others are based on.
    Shell,
    /// Python with packages.
    Python,
    /// Node.js with packages, a server.
    Node,
    /// A Java development kit.
    Java,
    /// What `Python` has, with a layer for each package.
    Layered,
}

/// The form of an image in the registry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Form {
    /// Layers as tar with gzip.
    Plain,
    /// The same, with what `ferry image convert` puts beside it.
    Prepared,
    /// The same, with what `ferry image convert --order-from` puts beside it after a start was recorded.
    Ordered,
    /// Layers with a table of contents.
    Estargz,
    /// Layers as they are, with what `soci` puts beside them.
    Soci,
}

impl Image {
    /// All that are started cold.
    pub const ALL: [Self; 4] = [Self::Shell, Self::Python, Self::Node, Self::Java];

    /// The list of its packages.
    pub fn packages(self) -> String {
        format!("{}.list", if self == Self::Layered { Self::Python } else { self }.name())
    }

    /// Its name in the rows and in the registry.
    pub fn name(self) -> &'static str {
        match self {
            Self::Shell => "shell",
            Self::Python => "python",
            Self::Node => "node",
            Self::Java => "java",
            Self::Layered => "layered",
        }
    }

    /// What is started in a container of it, and a word of what that prints first. ctr may lose what a program said that ends at once.
    pub fn command(self) -> (&'static [&'static str], &'static str) {
        match self {
            Self::Shell => (&["/usr/bin/bash", "-c", "echo ready; sleep 0.2"], "ready"),
            Self::Python | Self::Layered => (
                &[
                    "/usr/bin/python3",
                    "-c",
                    "import asyncio, http.server, json, sqlite3, ssl, jinja2, requests, time, yaml; print('ready', flush=True); time.sleep(0.2)",
                ],
                "ready",
            ),
            Self::Node => (
                &[
                    "/usr/bin/node",
                    "-e",
                    "const s = require('express')().listen(0, () => { console.log('ready'); setTimeout(() => s.close(), 200); })",
                ],
                "ready",
            ),
            Self::Java => (&["/usr/lib/jvm/default-java/bin/java", "--version"], "openjdk"),
        }
    }
}

impl Form {
    /// The repository of an image in this form.
    pub fn repository(self, image: &str) -> String {
        let directory = match self {
            Self::Plain => "plain",
            Self::Prepared => "prepared",
            Self::Ordered => "ordered",
            Self::Estargz => "estargz",
            Self::Soci => "soci",
        };
        format!("{directory}/{image}:1")
    }
}
