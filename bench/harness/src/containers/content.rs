//! The images: Debian's packages as layers, in a registry in each form that a snapshotter knows.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};

use super::engine::Engine;
use super::image::{Form, Image};
use super::systems::{Programs, System};
use crate::images::walk;
use crate::noise::Noise;
use crate::process;

/// How long a program may take that makes or pushes an image.
const TIMEOUT: Duration = Duration::from_secs(300);
/// What images have that is not needed in a container.
const REMOVED: [&str; 3] = ["usr/share/doc", "usr/share/man", "usr/share/locale"];
/// How many images are related.
pub const RELATED: usize = 20;
/// Of so many files one differs from one of them to the next.
const FILES_PER_CHANGE: u64 = 20;
/// The base is made anew for each so many.
const IMAGES_PER_BASE: usize = 5;

/// The images that have been made.
#[derive(Debug)]
pub struct Content {
    programs: Programs,
    directory: PathBuf,
    /// The registry's address.
    registry: String,
    /// What is there, or why it is not.
    made: BTreeMap<(Image, Form), Result<(), String>>,
    has_related: bool,
}

impl Content {
    /// None, in a new directory.
    pub fn new(programs: Programs, directory: PathBuf, registry: String) -> Result<Self> {
        fs::create_dir_all(&directory).with_context(|| format!("cannot create {}", directory.display()))?;
        let content = Self { programs, directory, registry, made: BTreeMap::new(), has_related: false };
        content.umoci(["init", "--layout", "layout"])?;
        Ok(content)
    }

    /// Makes an image in a form, if it was not made before.
    pub fn make(&mut self, image: Image, form: Form) -> Result<()> {
        if !self.made.contains_key(&(image, form)) {
            let outcome = match form {
                Form::Plain => self.plain(image),
                _ => self.make(image, Form::Plain).and_then(|()| self.convert(image, form)),
            };
            self.made.insert((image, form), outcome.map_err(|error| format!("{error:#}")));
        }
        let outcome = self.made.get(&(image, form)).context("it was just made")?;
        outcome.clone().map_err(|reason| anyhow!("no image {}: {reason}", form.repository(image.name())))
    }

    /// Makes the related images, if they were not made before: a base and an application, of which some files change each time.
    pub fn make_related(&mut self) -> Result<()> {
        if self.has_related {
            return Ok(());
        }
        self.make(Image::Shell, Form::Plain)?;
        self.make(Image::Python, Form::Plain)?;
        let [base, application] = [Image::Shell, Image::Python].map(|image| self.directory.join(image.name()));
        let mut noise = Noise(11);
        for number in 0..RELATED {
            if number > 0 && number % IMAGES_PER_BASE == 0 {
                change(&base, &mut noise)?;
            }
            change(&application, &mut noise)?;
            let name = format!("related{number}");
            let image = format!("layout:{name}");
            self.umoci(["new", "--image", &image])?;
            for root in [&base, &application] {
                self.umoci([OsStr::new("insert"), "--image".as_ref(), image.as_ref(), root.as_ref(), "/".as_ref()])?;
            }
            self.push(&name, Form::Plain)?;
        }
        self.has_related = true;
        Ok(())
    }

    fn plain(&mut self, image: Image) -> Result<()> {
        let name = image.name();
        if image == Image::Shell {
            self.umoci(["new", "--image", "layout:shell"])?;
        } else {
            self.make(Image::Shell, Form::Plain)?;
            self.umoci(["tag", "--image", "layout:shell", name])?;
        }
        let list = self.programs.packages.join(image.packages());
        let packages = fs::read_to_string(&list).with_context(|| format!("cannot read {}", list.display()))?;
        let packages: Vec<&str> = packages.lines().collect();
        let each = if image == Image::Layered { 1 } else { packages.len().max(1) };
        packages.chunks(each).try_for_each(|packages| self.layer(image, packages))?;
        self.push(name, Form::Plain)
    }

    /// Adds a layer with packages to an image.
    fn layer(&self, image: Image, packages: &[&str]) -> Result<()> {
        let root = self.directory.join(image.name());
        let _ = fs::remove_dir_all(&root);
        fs::create_dir(&root).with_context(|| format!("cannot create {}", root.display()))?;
        // Packages expect these, and have them or not.
        for place in ["bin", "sbin", "lib", "lib64"] {
            fs::create_dir_all(root.join("usr").join(place))?;
            if image == Image::Shell {
                std::os::unix::fs::symlink(format!("usr/{place}"), root.join(place))?;
            }
        }
        for package in packages {
            let mut command = Command::new("dpkg-deb");
            command.arg("-x").arg(self.programs.packages.join("root").join(package)).arg(&root);
            process::run(command, &self.directory, TIMEOUT).with_context(|| format!("cannot unpack {package}"))?;
        }
        for removed in REMOVED {
            let _ = fs::remove_dir_all(root.join(removed));
        }
        let tag = format!("layout:{}", image.name());
        self.umoci([OsStr::new("insert"), "--image".as_ref(), tag.as_ref(), root.as_ref(), "/".as_ref()])
    }

    /// Has a form made of the ordinary image, by the tool that those who use it have.
    fn convert(&self, image: Image, form: Form) -> Result<()> {
        let at = |form: Form| format!("{}/{}", self.registry, form.repository(image.name()));
        let (plain, made) = (at(Form::Plain), at(form));
        match form {
            Form::Plain => Ok(()),
            Form::Prepared => {
                self.push(image.name(), form)?;
                self.prepare(&made, None)
            }
            Form::Ordered => {
                self.push(image.name(), Form::Prepared)?;
                self.prepare(&at(Form::Prepared), None)?;
                let list = self.directory.join(format!("{}.trace", image.name()));
                let engine = self.engine(System::Prepared)?;
                engine.pull(image.name())?;
                engine.record(image, &self.programs.ferry, &list)?;
                drop(engine);
                self.push(image.name(), form)?;
                self.prepare(&made, Some(&list))
            }
            Form::Estargz => {
                let engine = self.engine(System::Overlayfs)?;
                engine.ctr(["images", "pull", "--local", &plain])?;
                let tool = |words: &[&str]| self.peer("ctr-remote", &engine, words);
                tool(&["images", "convert", "--estargz", "--oci", &plain, &made])?;
                tool(&["images", "push", &made])
            }
            Form::Soci => {
                self.push(image.name(), form)?;
                let engine = self.engine(System::Overlayfs)?;
                engine.ctr(["images", "pull", "--local", &made])?;
                let tool = |words: &[&str]| self.peer("soci", &engine, words);
                tool(&["create", &made])?;
                tool(&["push", &made])
            }
        }
    }

    /// Has Ferry convert an image, with the files in a list first.
    fn prepare(&self, reference: &str, order: Option<&Path>) -> Result<()> {
        let mut command = Command::new(&self.programs.ferry);
        command.args(["image", "convert"]).arg(format!("oci:{reference}"));
        command.arg("--store").arg(self.directory.join("store"));
        command.args(order.map(|list| [OsStr::new("--order-from"), list.as_os_str()]).into_iter().flatten());
        process::run(command, &self.directory, TIMEOUT).map(drop)
    }

    /// A containerd that makes images.
    fn engine(&self, system: System) -> Result<Engine> {
        let directory = self.directory.join("engine");
        Engine::start(system, directory, &self.programs, self.registry.clone())
    }

    fn peer(&self, program: &str, engine: &Engine, words: &[&str]) -> Result<()> {
        let peers = self.programs.peers.as_ref().context("there are no programs of other snapshotters")?;
        let mut command = Command::new(peers.join(program));
        command.arg("--address").arg(engine.socket()).args(words);
        process::run(command, &self.directory, TIMEOUT)
            .map(drop)
            .with_context(|| format!("{program} {}", words.join(" ")))
    }

    fn push(&self, name: &str, form: Form) -> Result<()> {
        let mut command = Command::new(&self.programs.skopeo);
        command.args(["--insecure-policy", "copy", "--quiet", "--dest-tls-verify=false"]);
        command.arg(format!("oci:layout:{name}")).arg(format!("docker://{}/{}", self.registry, form.repository(name)));
        command.current_dir(&self.directory);
        process::run(command, &self.directory, TIMEOUT).map(drop).with_context(|| format!("cannot push {name}"))
    }

    fn umoci<W: AsRef<OsStr>>(&self, words: impl IntoIterator<Item = W>) -> Result<()> {
        let mut command = Command::new(&self.programs.umoci);
        command.args(words).current_dir(&self.directory);
        process::run(command, &self.directory, TIMEOUT).map(drop).context("umoci failed")
    }
}

/// Makes some files of a tree others, as a new version does. They are never run.
fn change(root: &Path, noise: &mut Noise) -> Result<()> {
    for path in walk::files(root)? {
        if noise.below(FILES_PER_CHANGE) == 0 {
            let path = root.join(path);
            let changed =
                fs::OpenOptions::new().append(true).open(&path).and_then(|mut file| file.write_all(&noise.bytes(64)));
            changed.with_context(|| format!("cannot change {}", path.display()))?;
        }
    }
    Ok(())
}
