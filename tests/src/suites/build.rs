//! A tree of C sources built as a kernel is: directories with headers of their own, dependency files, archives, `make -j`.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

/// Directories of the tree, each of which becomes an archive.
const DIRECTORIES: u32 = 10;

const MAKEFILE: &str = r"
CC := gcc
CFLAGS := -O0 -w -Iinclude -MMD -MP
directories := $(sort $(patsubst %/,%,$(dir $(wildcard sub*/*.c))))
sources := $(wildcard sub*/*.c)
objects := $(sources:.c=.o)
archives := $(foreach directory,$(directories),$(directory)/built-in.a)

vmtiny: main.o $(archives)
	@echo LD $@
	@$(CC) -o $@ main.o -Wl,--start-group $(archives) -Wl,--end-group

%.o: %.c
	@echo CC $@
	@$(CC) $(CFLAGS) -c -o $@ $<

define archive
$(1)/built-in.a: $(filter $(1)/%,$(objects))
	@echo AR $$@
	@rm -f $$@ && ar rcD $$@ $$^
endef
$(foreach directory,$(directories),$(eval $(call archive,$(directory))))

.PHONY: clean
clean:
	rm -f vmtiny main.o main.d $(objects) $(objects:.o=.d) $(archives)

-include $(objects:.o=.d) main.d
";

/// The steps of a build test: build, check that it is up to date, rebuild after a header has changed,
/// and clean. What make built each time is kept in `../built.N`, what came out of it in `../sums.N`.
pub const BUILD: &str = r#"
unset MAKEFLAGS MFLAGS MAKELEVEL
sums() { find . -type f | LC_ALL=C sort | xargs sha256sum; }
sums >../sums.0
make -j4 | LC_ALL=C sort >../built.1
make -q
./vmtiny >../said.1
sums >../sums.1
sed -i 's/STEP 1/STEP 2/' include/sub3.h
make -j4 | LC_ALL=C sort >../built.2
make -q
./vmtiny >../said.2
sums >../sums.2
touch include/all.h
make -j4 | LC_ALL=C sort >../built.3
sums >../sums.3
make clean >/dev/null
sums >../sums.4
sed -i 's/STEP 2/STEP 1/' include/sub3.h
sums >../sums.5
cmp ../sums.0 ../sums.5
"#;

/// What [`BUILD`] leaves, to be compared with what it leaves elsewhere.
pub const LEFT: &[&str] =
    &["sums.0", "sums.1", "sums.2", "sums.3", "sums.4", "sums.5", "built.1", "built.2", "built.3", "said.1", "said.2"];

/// Writes the tree: `files` sources in all.
pub fn write_tree(root: &Path, files: u32) -> std::io::Result<()> {
    fs::create_dir_all(root.join("include"))?;
    fs::write(root.join("Makefile"), MAKEFILE)?;
    fs::write(root.join("include/all.h"), "#include <stdint.h>\nuint64_t mix(uint64_t sum, uint64_t with);\n")?;
    let mut main = String::from("#include <stdio.h>\n#include <all.h>\n");
    main.push_str("uint64_t mix(uint64_t sum, uint64_t with) { return sum * 31 + with; }\n");
    let mut calls = String::new();
    for directory in 0..DIRECTORIES {
        fs::create_dir_all(root.join(format!("sub{directory}")))?;
        let mut header = format!("#include <all.h>\n#define STEP 1\n#define DIR {directory}\n");
        for file in (directory..files).step_by(DIRECTORIES as usize) {
            writeln!(header, "uint64_t f{file}(uint64_t sum);").expect("a string takes all");
            writeln!(calls, "    sum = f{file}(sum);").expect("a string takes all");
            let source = format!(
                "#include <sub{directory}.h>\nstatic const char text[] = \"file {file}\";\n\
                 uint64_t f{file}(uint64_t sum) {{ return mix(sum + STEP, DIR + text[{}]); }}\n",
                file % 7
            );
            fs::write(root.join(format!("sub{directory}/f{file}.c")), source)?;
        }
        fs::write(root.join(format!("include/sub{directory}.h")), header)?;
        writeln!(main, "#include <sub{directory}.h>\n#undef STEP\n#undef DIR").expect("a string takes all");
    }
    write!(main, "int main(void) {{\n    uint64_t sum = 1;\n{calls}").expect("a string takes all");
    main.push_str("    printf(\"%llx\\n\", (unsigned long long)sum);\n    return 0;\n}\n");
    fs::write(root.join("main.c"), main)
}
