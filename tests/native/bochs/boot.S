/* Multiboot entry for the parity program on a bare CPU: 32-bit protected mode -> 64-bit mode with identity-mapped
 * memory, the wide register state switched on as an operating system would, then cmain(). There is no interrupt table:
 * any exception is a triple fault, which Bochs is told to end on. */
.set MAGIC, 0x1BADB002
.set FLAGS, 3                     /* page-aligned modules, memory information */

.section .multiboot, "a"
.align 4
    .long MAGIC, FLAGS, -(MAGIC + FLAGS)

.text
.code32
.global _start
_start:
    cli
    movl $pdpt + 3, pml4          /* present, writable */
    movl $pd + 3, pdpt
    xorl %ecx, %ecx
1:  movl %ecx, %eax               /* 512 pages of 2 MiB: the first GiB */
    shll $21, %eax
    orl $0x83, %eax
    movl %eax, pd(, %ecx, 8)
    incl %ecx
    cmpl $512, %ecx
    jne 1b
    movl $pml4, %eax
    movl %eax, %cr3
    movl %cr4, %eax
    orl $0x40620, %eax            /* PAE, OSFXSR, OSXMMEXCPT, OSXSAVE */
    movl %eax, %cr4
    movl $0xC0000080, %ecx        /* EFER.LME */
    rdmsr
    orl $0x100, %eax
    wrmsr
    movl %cr0, %eax
    andl $~4, %eax                /* no x87 emulation */
    orl $0x80000003, %eax         /* paging, monitor coprocessor, protection */
    movl %eax, %cr0
    lgdt gdt_register
    ljmp $8, $long_mode

.code64
long_mode:
    movw $16, %ax
    movw %ax, %ds
    movw %ax, %es
    movw %ax, %ss
    movq $stack_top, %rsp
    movl $13, %eax                /* which register state this CPU can save, cut to x87, SSE, AVX, opmask, ZMM */
    xorl %ecx, %ecx
    cpuid
    andl $0xe7, %eax
    xorl %edx, %edx
    xorl %ecx, %ecx
    xsetbv
    fninit
    call cmain
2:  hlt
    jmp 2b

.data
.align 16
gdt:
    .quad 0
    .quad 0x00af9a000000ffff      /* 64-bit code */
    .quad 0x00cf92000000ffff      /* data */
gdt_register:
    .word . - gdt - 1
    .long gdt

.bss
.align 4096
pml4: .skip 4096
pdpt: .skip 4096
pd:   .skip 4096
stack: .skip 262144
stack_top:

.section .note.GNU-stack, "", @progbits
